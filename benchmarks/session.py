"""How soon does the second turn of a long conversation begin to answer?

    pip install -c constraints.txt ".[bench]"
    python -m benchmarks.session            # some minutes
    python -m benchmarks.session --quick    # a short history; writes no file

smollm2 is given a history of 2,000 tokens of a novel (benchmarks/texts) and answers with 32; then comes the whole text
with 24 tokens more. Through a `kvcache.hf.Session` only these and the last token of the answer are computed. Beside it,
in the same run: a step of decoding at the same length, without which no token comes, and `model.generate` of
transformers, which computes all again. Turns are undone and repeated; times are medians. It prints a table and writes
benchmarks/results/session.json.
"""

import argparse
import json
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from kvcache.hf import Session, load_model

from .generate_case import TEXT
from .machine import machine

HISTORY, ANSWER, QUESTION = 2000, 32, 24
ROUNDS, COLD_ROUNDS = 9, 2
RESULTS = Path(__file__).parent / "results" / "session.json"


def first_and_later(session: Session, tokens: list[int]) -> tuple[float, float]:
    """Return the seconds to the first token, and the median of those between later ones."""
    times = [time.perf_counter()]
    for _ in session.stream(tokens, max_new_tokens=ANSWER, min_new_tokens=ANSWER, do_sample=False):
        times.append(time.perf_counter())
    steps = [later - earlier for earlier, later in pairwise(times[1:])]
    return times[1] - times[0], statistics.median(steps)


def cold_first(model: Any, tokens: list[int]) -> float:
    """Return the seconds that transformers takes to one token."""
    ids = torch.tensor([tokens])
    start = time.perf_counter()
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)
    return time.perf_counter() - start


def measure(dtype: str, history: int) -> dict[str, Any]:
    model, tokenizer = load_model("smollm2", dtype=dtype)
    text = tokenizer(TEXT.read_text(encoding="utf-8"), verbose=False)["input_ids"]
    session = Session(model, tokenizer)
    answer = session.generate(text[:history], max_new_tokens=ANSWER, min_new_tokens=ANSWER, do_sample=False)
    turn = text[:history] + answer.token_ids + text[history : history + QUESTION]
    firsts, steps, colds = [], [], []
    for index in range(ROUNDS):
        first, step = first_and_later(session, turn)
        firsts.append(first)
        steps.append(step)
        assert session.usage is not None
        usage = session.usage
        session.undo()
        if index < COLD_ROUNDS:
            colds.append(cold_first(model, turn))
    first, step, cold = map(statistics.median, (firsts, steps, colds))
    return {
        "dtype": dtype,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "computed_tokens": usage.computed_tokens,
        "first_token_milliseconds": first * 1e3,
        "step_milliseconds": step * 1e3,
        "first_token_over_step": first / step,
        "cold_first_token_milliseconds": cold * 1e3,
        "cold_over_first_token": cold / first,
    }


def report(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| weights | tokens | of them computed | first token, ms | a step, ms | first / step | all again, ms | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['dtype']} | {row['prompt_tokens']:,} | {row['computed_tokens']} "
        f"| {row['first_token_milliseconds']:.0f} | {row['step_milliseconds']:.0f} "
        f"| {row['first_token_over_step']:.2f} "
        f"| {row['cold_first_token_milliseconds']:,.0f} | {row['cold_over_first_token']:.0f}x |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="How soon does the second turn of a long conversation begin?")
    parser.add_argument("--quick", action="store_true", help="a short history; writes no file")
    quick = parser.parse_args().quick
    rows = [measure(dtype, 200 if quick else HISTORY) for dtype in ("float32", "bfloat16")]
    print(f"smollm2, the second turn through a Session. {machine()}.\n\n{report(rows)}")
    if not quick:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
