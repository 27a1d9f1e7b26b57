"""How long does it take from the command to the first token?

    pip install -c constraints.txt ".[bench]"
    python -m benchmarks.start            # half a minute
    python -m benchmarks.start --quick    # one process each; writes no file

`kvcache generate` with smollm2, which was fetched before, in float32 and in bfloat16, in turns, each time in a fresh
process. The command itself says how long it took and for what, counted from the moment when the system started its
process; beside it stands the time to the end of the process as seen from outside, 8 tokens and the report included. It
prints a table of medians and writes benchmarks/results/start.json.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .machine import machine

PROMPT, NEW_TOKENS = "What is the capital of France?", 8
DTYPES = ("float32", "bfloat16")
STAGES = {
    "imports": "interpreter and imports",
    "model": "model and tokenizer",
    "engine": "engine",
    "first_token": "prompt, first token",
    "total": "command to first token",
    "process": "command to its end",
}
ROUNDS = 3
RESULTS = Path(__file__).parent / "results" / "start.json"


def start(dtype: str) -> dict[str, float]:
    """Run the command once, and return the seconds of its stages."""
    command = [sys.executable, "-m", "kvcache", "generate", PROMPT, "--dtype", dtype, "--json"]
    before = time.perf_counter()
    done = subprocess.run([*command, "--max-new-tokens", str(NEW_TOKENS)], capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - before
    return {**json.loads(done.stdout)["start_seconds"], "process": seconds}


def measure(rounds: int) -> list[dict[str, Any]]:
    """Return a row for each dtype: the medians of the stages, and all totals."""
    times: dict[str, list[dict[str, float]]] = {dtype: [] for dtype in DTYPES}
    for _ in range(rounds):
        for dtype in DTYPES:
            times[dtype].append(start(dtype))
            print(f"{dtype}: first token after {times[dtype][-1]['total']:.2f} s", file=sys.stderr, flush=True)
    return [
        {
            "dtype": dtype,
            "seconds": {stage: statistics.median(one[stage] for one in times[dtype]) for stage in STAGES},
            "totals": [one["total"] for one in times[dtype]],
        }
        for dtype in DTYPES
    ]


def report(rows: list[dict[str, Any]]) -> str:
    """Return a table in Markdown, a line for each stage."""
    lines = [f"| seconds | {' | '.join(row['dtype'] for row in rows)} |", "|---" * (len(rows) + 1) + "|"]
    for stage, name in STAGES.items():
        lines.append(f"| {name} | {' | '.join(format(row['seconds'][stage], '.2f') for row in rows)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="How long does it take from the command to the first token?")
    parser.add_argument("--quick", action="store_true", help="one process each; writes no file")
    quick = parser.parse_args().quick
    # transformers imports SciPy where it is installed.
    environment = machine() + (", with SciPy" if find_spec("scipy") else ", without SciPy")
    rows = measure(1 if quick else ROUNDS)
    print(f"smollm2, from the command to the first token, medians. {environment}.\n\n{report(rows)}")
    if not quick:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps({"machine": environment, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
