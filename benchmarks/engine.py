"""How fast are many prompts, together, through the engine?

    pip install -c constraints.txt ".[bench]"
    python -m benchmarks.engine            # half an hour
    python -m benchmarks.engine --quick    # 4 short prompts; writes no file

smollm2 gets 32 prompts, 64 new tokens each: once with a system prompt of 1,000 tokens in common and 20 to 200 of their
own, once unrelated ones of 20 to 200. Beside the engine, in the same run: transformers' own continuous batching
(`generate_batch`), and `generate` one prompt after the other and in padded batches of 8. It prints tokens a second (of
prompts and new ones, together), the time to the first token where it can be told (median and 95th percentile), and
prompt tokens that were found. A third table has the time to the first token of a prompt of 2,000 tokens that was wholly
seen before, over a step of decoding. It writes benchmarks/results/engine.json.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvcache import Engine
from kvcache.hf import load_model

from .generate_case import TEXT
from .machine import machine

RESULTS = Path(__file__).parent / "results" / "engine.json"
NUM_PROMPTS, SHARED, OWN, NEW = 32, 1000, (20, 200), 64
SEEN = 2000
BATCH = 8

Prompts = list[list[int]]


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def through_engine(model: Any, tokenizer: Any, prompts: Prompts) -> dict[str, Any]:
    with Engine(model, tokenizer, memory="1GiB") as engine:
        engine.generate(prompts[0][:8], max_new_tokens=2)
        start = time.perf_counter()
        answers = engine.generate_many(prompts, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, progress=False)
        duration = time.perf_counter() - start
    firsts = [answer.timings.first_token for answer in answers]
    return {
        "seconds": duration,
        "first_token_seconds": [statistics.median(firsts), percentile(firsts, 0.95)],
        "cached_tokens": sum(answer.usage.cached_tokens for answer in answers),
        "token_ids": [answer.token_ids for answer in answers],
    }


def one_after_the_other(model: Any, tokenizer: Any, prompts: Prompts) -> dict[str, Any]:
    return in_batches(model, tokenizer, prompts, 1)


def in_batches(model: Any, tokenizer: Any, prompts: Prompts, size: int = BATCH) -> dict[str, Any]:
    start, token_ids = time.perf_counter(), []
    pad = tokenizer.pad_token_id or 0
    for first in range(0, len(prompts), size):
        batch = prompts[first : first + size]
        longest = max(map(len, batch))
        ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in batch])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in batch])
        output = model.generate(
            ids, attention_mask=mask, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=pad
        )
        token_ids += output[:, longest:].tolist()
    return {"seconds": time.perf_counter() - start, "token_ids": token_ids}


def continuous(model: Any, tokenizer: Any, prompts: Prompts) -> dict[str, Any]:
    from transformers import GenerationConfig

    config = GenerationConfig(
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=tokenizer.pad_token_id or 0,
    )
    start = time.perf_counter()
    outputs = model.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
    duration = time.perf_counter() - start
    return {"seconds": duration, "token_ids": [list(output.generated_tokens) for output in outputs.values()]}


WAYS: dict[str, Callable[[Any, Any, Prompts], dict[str, Any]]] = {
    "engine": through_engine,
    "transformers, continuous batching": continuous,
    "transformers, padded batches": in_batches,
    "transformers, one by one": one_after_the_other,
}


def workloads(text: list[int], num_prompts: int, shared: int) -> dict[str, Prompts]:
    rng = random.Random(0)
    lengths = [rng.randint(*OWN) for _ in range(2 * num_prompts)]
    pieces, place = [], shared
    for length in lengths:
        pieces.append(text[place : place + length])
        place += length
    return {
        "shared prefix": [text[:shared] + piece for piece in pieces[:num_prompts]],
        "unrelated": pieces[num_prompts:],
    }


def measure(dtype: str, num_prompts: int, shared: int, ways: list[str]) -> list[dict[str, Any]]:
    model, tokenizer = load_model("smollm2", dtype=dtype)
    text = tokenizer(TEXT.read_text(encoding="utf-8"), verbose=False)["input_ids"]
    rows = []
    for workload, prompts in workloads(text, num_prompts, shared).items():
        expected = None
        for way in ways:
            try:
                row = WAYS[way](model, tokenizer, prompts)
            except Exception as error:
                print(f"{way}: {type(error).__name__}: {error}")
                continue
            token_ids = row.pop("token_ids")
            expected = token_ids if expected is None else expected
            num_tokens = sum(map(len, prompts)) + sum(map(len, token_ids))
            same = sum(one == other for one, other in zip(token_ids, expected, strict=True))
            row |= {"tokens_per_second": num_tokens / row["seconds"], "same_texts": same}
            rows.append({"dtype": dtype, "workload": workload, "way": way, **row})
            print(rows[-1], flush=True)
    return rows


def seen_before(dtype: str, num_tokens: int) -> dict[str, Any]:
    model, tokenizer = load_model("smollm2", dtype=dtype)
    prompt = tokenizer(TEXT.read_text(encoding="utf-8"), verbose=False)["input_ids"][:num_tokens]
    with Engine(model, tokenizer, memory="1GiB") as engine:
        answers = [engine.generate(prompt, max_new_tokens=16, min_new_tokens=16, do_sample=False) for _ in range(10)]
    cold, warm = answers[0], answers[1:]
    first = statistics.median(answer.timings.first_token for answer in warm)  # type: ignore[union-attr]
    step = statistics.median(answer.timings.per_token for answer in warm)  # type: ignore[union-attr, type-var]
    return {
        "dtype": dtype,
        "prompt_tokens": num_tokens,
        "cached_tokens": warm[0].usage.cached_tokens,  # type: ignore[union-attr]
        "cold_seconds": cold.timings.first_token,  # type: ignore[union-attr]
        "first_token_seconds": first,
        "step_seconds": step,
        "first_token_over_step": first / step,
    }


def report(rows: list[dict[str, Any]], seen: list[dict[str, Any]]) -> str:
    lines = [
        "| weights | prompts | way | tokens/s | of the engine's | first token, s (median, 95 %) | found | same texts |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ours = next(
            other["tokens_per_second"]
            for other in rows
            if (other["dtype"], other["workload"]) == (row["dtype"], row["workload"])
        )
        firsts = row.get("first_token_seconds")
        lines.append(
            f"| {row['dtype']} | {row['workload']} | {row['way']} | {row['tokens_per_second']:.0f} "
            f"| {row['tokens_per_second'] / ours:.2f} "
            f"| {'-' if firsts is None else f'{firsts[0]:.1f}, {firsts[1]:.1f}'} "
            f"| {row.get('cached_tokens', '-')} | {row['same_texts']} |"
        )
    lines += [
        "",
        "| weights | prompt | found | cold, s | first token, ms | a step, ms | |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['dtype']} | {row['prompt_tokens']:,} | {row['cached_tokens']:,} | {row['cold_seconds']:.1f} "
        f"| {row['first_token_seconds'] * 1e3:.0f} | {row['step_seconds'] * 1e3:.0f} "
        f"| {row['first_token_over_step']:.2f} |"
        for row in seen
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="How fast are many prompts, together, through the engine?")
    parser.add_argument("--quick", action="store_true", help="4 short prompts; writes no file")
    parser.add_argument("--dtype", nargs="*", default=["float32", "bfloat16"], help="of the weights")
    parser.add_argument("--way", nargs="*", default=list(WAYS), choices=WAYS, help="which to run")
    arguments = parser.parse_args()
    num_prompts, shared, num_seen = (4, 100, 200) if arguments.quick else (NUM_PROMPTS, SHARED, SEEN)
    rows, seen = [], []
    for dtype in arguments.dtype:
        rows += measure(dtype, num_prompts, shared, arguments.way)
        seen.append(seen_before(dtype, num_seen))
    print(f"smollm2. {machine()}.\n\n{report(rows, seen)}")
    if not arguments.quick and arguments.way == list(WAYS):
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps({"machine": machine(), "rows": rows, "seen_before": seen}, indent=2) + "\n")


if __name__ == "__main__":
    main()
