"""How fast are many prompts, together, through the engine?

    pip install -c constraints.txt ".[bench]"
    python -m benchmarks.peers vllm        # once, 5 minutes: vLLM, in an environment of its own
    python -m benchmarks.engine            # an hour
    python -m benchmarks.engine --quick    # 4 short prompts; writes no file

smollm2 gets 32 prompts, 64 new tokens each: once with a system prompt of 1,000 tokens in common and 20 to 200 of their
own, once unrelated ones of 20 to 200. Beside the engine: vLLM's build for CPUs, transformers' own continuous batching,
and its `generate` in padded batches of 8 and one prompt after the other, in float32 and in bfloat16. Every case has a
process of its own, warmed up with a tiny prompt; keys and values get 1 GiB where that can be said. It prints

    tokens/s      of prompts and new ones, together
    first token   seconds from asking, which is for all at once, to a prompt's first token: median, 95th percentile
    found         tokens of the prompts whose keys and values were there
    memory        the most that the process had, model included, and before the prompts came
    same texts    how many have the tokens that the engine gives in the same dtype

and each side's faster dtype against the engine's. A last table has a prompt of 2,000 tokens that was wholly seen
before: its first token, over a step of decoding. It writes benchmarks/results/engine.json if all sides ran.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from kvcache.hf import smollm2

from .engine_case import SIDES as OWN_SIDES
from .generate import aligned
from .generate_case import TEXT
from .machine import machine
from .peers import FOLDER, python, vllm_variables
from .process import CaseError, run_case

RESULTS = Path(__file__).parent / "results" / "engine.json"
OURS, VLLM = "kvcache", "vLLM"
SIDES = (OURS, VLLM, *(side for side in OWN_SIDES if side != OURS))
KEEP_PREFIXES = (OURS, VLLM, "transformers, continuous batching")
DTYPES = ("float32", "bfloat16")
MEMORY = 1 << 30
NUM_PROMPTS, SHARED, OWN, NEW = 32, 1000, (20, 200), 64
SEEN, TIMES, SEEN_NEW = 2000, 10, 16
WARM_UP = [1] * 8  # a special token, so that it begins none of the prompts

Prompts = list[list[int]]
Row = dict[str, Any]


def workloads(text: list[int], num_prompts: int, shared: int) -> dict[str, Prompts]:
    rng = random.Random(0)
    pieces = []
    for _ in range(2 * num_prompts):
        start = rng.randrange(shared, len(text) - OWN[1])
        pieces.append(text[start : start + rng.randint(*OWN)])
    return {
        "shared prefix": [text[:shared] + piece for piece in pieces[:num_prompts]],
        "unrelated": pieces[num_prompts:],
    }


def run(side: str, folder: Path, dtype: str, rounds: list[Prompts], new_tokens: int) -> dict[str, Any]:
    """Return what a side measured, in a process of its own."""
    job = {"side": side, "model": str(folder), "dtype": dtype, "rounds": rounds, "new_tokens": new_tokens}
    command, variables = [sys.executable, "-m", "benchmarks.engine_case"], {}
    if side == VLLM:
        command, variables = [str(python("vllm")), str(FOLDER / "vllm_engine.py")], vllm_variables(MEMORY)
    return run_case(command, job | {"memory": MEMORY, "warm_up": WARM_UP}, variables)


def measure(side: str, folder: Path, dtype: str, workload: str, prompts: Prompts) -> Row:
    result = run(side, folder, dtype, [prompts], NEW)
    (one,) = result["rounds"]
    firsts = one["first_token_seconds"]
    num_tokens = sum(map(len, prompts)) + sum(map(len, one["token_ids"]))
    return {
        "side": side,
        "dtype": dtype,
        "workload": workload,
        "seconds": one["seconds"],
        "tokens_per_second": num_tokens / one["seconds"],
        "first_token_seconds": [statistics.median(firsts), statistics.quantiles(firsts, n=20, method="inclusive")[-1]],
        "cached_tokens": one.get("cached_tokens"),
        "peak_nbytes": result["peak_nbytes"],
        "loaded_nbytes": result["loaded_nbytes"],
        "token_ids": one["token_ids"],
    }


def compare(rows: list[Row]) -> None:
    """Say of each row how it stands to the engine's of the same dtype and prompts, if that was measured."""
    ours = {(row["dtype"], row["workload"]): row for row in rows if row["side"] == OURS}
    for row in rows:
        engine = ours.get((row["dtype"], row["workload"]))
        row["over_engine"] = engine and row["tokens_per_second"] / engine["tokens_per_second"]
        pairs = engine and zip(row["token_ids"], engine["token_ids"], strict=True)
        row["same_texts"] = pairs and sum(one == other for one, other in pairs)
    for row in rows:
        del row["token_ids"]


def seen_before(side: str, folder: Path, dtype: str, prompt: list[int]) -> Row:
    cold, *warm = run(side, folder, dtype, [[prompt]] * TIMES, SEEN_NEW)["rounds"]
    first = statistics.median(one["first_token_seconds"][0] for one in warm)
    step = statistics.median(one["step_seconds"][0] for one in warm)
    return {
        "side": side,
        "dtype": dtype,
        "prompt_tokens": len(prompt),
        "cached_tokens": warm[0]["cached_tokens"],
        "cold_seconds": cold["first_token_seconds"][0],
        "first_token_seconds": first,
        "step_seconds": step,
        "first_token_over_step": first / step,
    }


def table(head: str, rows: list[tuple[Any, ...]]) -> str:
    columns = [column.strip() for column in head.split("|")]
    cells = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    return aligned([f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *cells)])


def report(rows: list[Row]) -> str:
    return table(
        "weights | prompts | side | tokens/s | of the engine's | first token, s | found | memory, MB | same texts",
        [
            (
                row["dtype"],
                row["workload"],
                row["side"],
                f"{row['tokens_per_second']:.0f}",
                row["over_engine"] and f"{row['over_engine']:.2f}",
                "{:.1f}, {:.1f}".format(*row["first_token_seconds"]),
                row["cached_tokens"],
                f"{row['peak_nbytes'] / 1e6:,.0f}, {row['loaded_nbytes'] / 1e6:,.0f}",
                row["same_texts"],
            )
            for row in rows
        ],
    )


def summary(rows: list[Row]) -> str:
    """Return a table of each side's faster dtype."""
    best: dict[tuple[str, str], Row] = {}
    for row in sorted(rows, key=lambda row: float(row["tokens_per_second"])):
        best[row["workload"], row["side"]] = row
    lines = []
    for workload, side in dict.fromkeys((row["workload"], row["side"]) for row in rows):
        row, engine = best[workload, side], best.get((workload, OURS))
        ratio = engine and f"{engine['tokens_per_second'] / row['tokens_per_second']:.2f}x"
        lines.append((workload, side, row["dtype"], f"{row['tokens_per_second']:.0f}", ratio))
    return table("prompts | side | its faster weights | tokens/s | the engine's best over it", lines)


def report_seen(rows: list[Row]) -> str:
    return table(
        "weights | side | prompt | found | cold, s | first token, ms | a step, ms | first token / step",
        [
            (
                row["dtype"],
                row["side"],
                f"{row['prompt_tokens']:,}",
                f"{row['cached_tokens']:,}",
                f"{row['cold_seconds']:.1f}",
                f"{row['first_token_seconds'] * 1e3:.0f}",
                f"{row['step_seconds'] * 1e3:.0f}",
                f"{row['first_token_over_step']:.2f}",
            )
            for row in rows
        ],
    )


def add_row(rows: list[Row], case: Callable[..., Row], side: str, folder: Path, dtype: str, *of_what: Any) -> bool:
    """Add what a case measured; where it fails, say so and go on. Return whether it did not."""
    start = time.perf_counter()
    try:
        rows.append(case(side, folder, dtype, *of_what))
    except CaseError as error:
        progress(dtype, side, str(error))
        return False
    progress(
        dtype, rows[-1].get("workload", "seen before"), side, f"{time.perf_counter() - start:.0f} s, with its start"
    )
    return True


def progress(*what: str) -> None:
    print(": ".join(what), file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="How fast are many prompts, together, through the engine?")
    parser.add_argument("--quick", action="store_true", help="4 short prompts; writes no file")
    parser.add_argument("--dtype", nargs="+", default=DTYPES, choices=DTYPES, help="of the weights; writes no file")
    parser.add_argument("--side", nargs="+", default=SIDES, choices=SIDES, help="only these; writes no file")
    arguments = parser.parse_args()
    sides = [side for side in SIDES if side in arguments.side]
    if VLLM in sides and not python("vllm").exists():
        progress("without vLLM, and without a file", "`python -m benchmarks.peers vllm` makes its environment")
        sides.remove(VLLM)
    folder = smollm2.prepare(progress)
    text = AutoTokenizer.from_pretrained(folder)(TEXT.read_text(encoding="utf-8"), verbose=False)["input_ids"]
    num_prompts, shared, num_seen = (4, 100, 200) if arguments.quick else (NUM_PROMPTS, SHARED, SEEN)
    rows, seen = list[Row](), list[Row]()
    complete = not arguments.quick and len(sides) == len(SIDES) and set(arguments.dtype) == set(DTYPES)
    for dtype in arguments.dtype:
        for workload, prompts in workloads(text, num_prompts, shared).items():
            for side in sides:
                complete &= add_row(rows, measure, side, folder, dtype, workload, prompts)
        for side in (side for side in sides if side in KEEP_PREFIXES):
            complete &= add_row(seen, seen_before, side, folder, dtype, text[:num_seen])
    compare(rows)
    print(f"smollm2. {machine()}.\n\n{report(rows)}\n\n{summary(rows)}\n\n{report_seen(seen)}")
    if complete:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps({"machine": machine(), "rows": rows, "seen_before": seen}, indent=2) + "\n")


if __name__ == "__main__":
    main()
