"""How many tokens a second does `generate` give with this package's caches and attention, and with transformers' own?

    pip install -c constraints.txt ".[bench]"
    python -m benchmarks.generate            # about 20 minutes, 10 GB of memory
    python -m benchmarks.generate --quick    # one setting; writes no files

smollm2 continues prompts from a novel (benchmarks/texts), greedily, in float32 and in bfloat16, for one request and for
a batch, behind contexts of several lengths. Each case has a process of its own with the model in it, so that its peak
of memory is its own. The processes of one setting take turns, some tokens each, so that whatever else the machine does
meets all of them; while one works the others wait. It prints, and writes to benchmarks/results/generate.json and .png:

    decode        tokens a second: the batch over the median time of a step
    prefill       seconds from the prompt to the first token, once
    memory        the most that the process had beyond the model, loaded and used once
    cache         bytes of the cache's buffers at the end, free rows included

Three settings leave the prompt out, which takes minutes, the same in each system's linear layers. Their caches are
filled with random numbers instead, memory is that of decoding alone, and tokens are not compared. A batch of 4 behind
6,000 tokens is left out altogether: with transformers' caches a step of it takes seconds.

Tokens are compared with DynamicCache's: the same up to where two tokens are nearly as likely and roundings decide.
"""

import argparse
import json
import multiprocessing
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from .generate_case import MODEL, NEW_TOKENS, TEXT, TURNS, Setting, System, serve
from .generate_plot import BASELINE, plot
from .machine import machine

SYSTEMS = (
    System("DynamicCache"),
    System("StaticCache"),
    System("cache_for"),
    System("use_attention, float32", "float32", fused=True),
    System("use_attention, bfloat16", "bfloat16", fused=True),
    System("use_attention, int8", "int8", fused=True),
)
SETTINGS = (
    Setting("float32", 42, 1, prefill=True),
    Setting("float32", 2048, 1, prefill=True),
    Setting("float32", 6000, 1, prefill=True),
    Setting("float32", 42, 4, prefill=True),
    Setting("float32", 2048, 4, prefill=False),
    Setting("bfloat16", 42, 1, prefill=True),
    Setting("bfloat16", 2048, 1, prefill=True),
    Setting("bfloat16", 6000, 1, prefill=False),
    Setting("bfloat16", 42, 4, prefill=True),
    Setting("bfloat16", 2048, 4, prefill=False),
)
QUICK = Setting("float32", 512, 1, prefill=True)
RESULTS = Path(__file__).parent / "results" / "generate.json"

Row = dict[str, Any]


def systems_for(setting: Setting, systems: Iterable[System]) -> list[System]:
    """A store that is wider than the weights gains nothing."""
    return [one for one in systems if (one.storage, setting.dtype) != ("float32", "bfloat16")]


def measure(setting: Setting, systems: Sequence[System]) -> list[Row]:
    """Measure all systems in turn, each in a fresh process."""
    started = [start(system, setting) for system in systems]
    try:
        for _, connection in started:
            connection.recv()  # the model is loaded
        for _, connection in started:
            ask(connection, "warm up")
        for system, (_, connection) in zip(systems, started, strict=True):
            seconds = ask(connection, "first token")
            progress(setting, system, "prompt filled in" if seconds is None else f"prompt in {seconds:.1f} s")
        for _ in range(TURNS):
            for system, (_, connection) in zip(systems, started, strict=True):
                progress(setting, system, f"a step in {ask(connection, 'turn') * 1e3:.1f} ms")
        rows = [
            {"system": system.name, **asdict(setting), **ask(connection, "finish").as_row(setting.batch)}
            for system, (_, connection) in zip(systems, started, strict=True)
        ]
    finally:
        for process, _ in started:
            process.terminate()
            process.join()
    compare(rows)
    return rows


def start(system: System, setting: Setting) -> tuple[BaseProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(system, setting, theirs), daemon=True)
    process.start()
    theirs.close()  # so that its end is noticed here
    return process, ours


def ask(connection: Connection, request: str) -> Any:
    connection.send(request)
    return connection.recv()


def progress(setting: Setting, system: System, what: str) -> None:
    print(f"{setting}: {system.name}: {what}", file=sys.stderr, flush=True)


def compare(rows: list[Row]) -> None:
    """Say of each row how it stands to the baseline's, if that was measured."""
    baseline = next((row for row in rows if row["system"] == BASELINE), None)
    tokens = {row["system"]: row.pop("token_ids") for row in rows}
    for row in rows:
        known = baseline is not None and row["prefill"]
        row["same_tokens"] = tokens[row["system"]] == tokens[BASELINE] if known else None
        row["decode_over_baseline"] = row["tokens_per_second"] / baseline["tokens_per_second"] if baseline else None


def report(rows: list[Row]) -> str:
    """Return a table in Markdown, a line for each case."""
    lines = [
        "| weights | prompts | cache | decode, tokens/s | | prefill, s | memory, MB | cache, MB | tokens |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    before = None
    for row in rows:
        setting = row["dtype"], f"{row['batch']} x {row['context']:,}"
        shown = setting if setting != before else ("", "")
        before = setting
        ratio = row["decode_over_baseline"]
        seconds = row["prefill_seconds"]
        cells = (
            *shown,
            row["system"],
            f"{row['tokens_per_second']:.1f}",
            "" if ratio is None else f"{ratio:.2f}x",
            "" if seconds is None else f"{seconds:.1f}",
            f"{row['peak_memory'] / 1e6:,.0f}",
            f"{row['cache_nbytes'] / 1e6:,.1f}",
            {None: "", True: "the same", False: "differ"}[row["same_tokens"]],
        )
        lines.append(f"| {' | '.join(cells)} |")
    return aligned(lines)


def aligned(lines: list[str]) -> str:
    """Return a Markdown table whose columns also line up as text."""
    table = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    padded = (
        [cell.ljust(width, "-" if cell == "---" else " ") for cell, width in zip(row, widths, strict=True)]
        for row in table
    )
    return "\n".join(f"| {' | '.join(row)} |" for row in padded)


def main() -> None:
    parser = argparse.ArgumentParser(description="How many tokens a second does generate give with each cache?")
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK}; writes no files")
    names = [system.name for system in SYSTEMS]
    parser.add_argument("--systems", nargs="+", choices=names, default=names, help="only these; writes no files")
    arguments = parser.parse_args()
    chosen = [system for system in SYSTEMS if system.name in arguments.systems]
    rows = [
        row
        for setting in ((QUICK,) if arguments.quick else SETTINGS)
        for row in measure(setting, systems_for(setting, chosen))
    ]
    print(f"{MODEL} continues {TEXT.stem}, {NEW_TOKENS} new tokens, greedily. {machine()}.\n")
    print(report(rows))
    if arguments.quick or len(chosen) < len(SYSTEMS):
        return
    data = {"machine": machine(), "model": MODEL, "text": TEXT.name, "new_tokens": NEW_TOKENS, "rows": rows}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(data, indent=2) + "\n")
    plot(data, RESULTS.with_suffix(".png"))


if __name__ == "__main__":
    main()
