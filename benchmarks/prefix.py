"""What does a shared prefix cost to find, and what does it save?

    pip install -c constraints.txt ".[bench]"
    python -m benchmarks.prefix            # some minutes
    python -m benchmarks.prefix --quick    # smaller numbers, no bfloat16; writes no file

Three tables. *Looking up*: a text of 100,000 tokens that is wholly kept, in blocks of 16 and of 64, for full layers
alone and with sliding ones. *Growth*: what a block costs to find, to keep and to evict while 1,000 to 1,000,000 blocks
are kept, as texts of 1,000 blocks each, and as children of one parent. *A model*: smollm2 gets prompts of which the
first 1,000 tokens were seen before; the time to the first token through a `PrefixCache`, beside a whole prompt through
the same pool, a step of decoding, and transformers, which is given the whole prompt, or the rest behind a copy of the
cache of the first 1,000. Times are medians of one run. It writes benchmarks/results/prefix.json.
"""

import argparse
import copy
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from kvcache import BlockPool, CacheSpec, LayerSpec, PrefixCache, Sequence
from kvcache.hf import forward_step, load_model, use_attention
from kvcache.hf.versions import CACHE_ARGUMENT
from kvcache.prefix.nodes import Root

from .generate_case import TEXT
from .machine import machine

RESULTS = Path(__file__).parent / "results" / "prefix.json"
SMALL = LayerSpec(num_heads=1, head_dim=1)
SHARED, OWN = 1000, 50
TEXT_BLOCKS = 1000  # of each text while the number of blocks grows


def seconds(act: Callable[[], Any]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def milliseconds(act: Callable[[], Any], rounds: int) -> float:
    return statistics.median(seconds(act) for _ in range(rounds)) * 1e3


def random_text(length: int) -> list[int]:
    return random.choices(range(50_000), k=length)


def store(prefixes: PrefixCache, tokens: list[int]) -> float:
    """Run a text through a pool whose rows do not matter; return the seconds that the commit took."""
    sequence, pool = prefixes.acquire(tokens), prefixes.pool
    tokens = tokens[sequence.seq_len :]
    with pool.step([sequence], [tokens]) as step:
        for layer in range(len(pool.spec.layers)):
            step.append(layer, *torch.zeros(2, 1, 1, len(tokens), 1))
        duration = seconds(step.commit)
    sequence.free()
    return duration


def look_up(num_tokens: int, block_size: int, window: int | None) -> dict[str, Any]:
    spec = CacheSpec([SMALL] if window is None else [SMALL, LayerSpec(1, 1, window=window)])
    prefixes = PrefixCache(BlockPool(spec, num_tokens // block_size + 2, block_size))
    tokens = random_text(num_tokens)
    store(prefixes, tokens)
    held: list[Sequence] = []
    return {
        "tokens": num_tokens,
        "block_size": block_size,
        "window": window,
        "lookup_milliseconds": milliseconds(lambda: prefixes.lookup(tokens), 9),
        "acquire_milliseconds": milliseconds(lambda: held.append(prefixes.acquire(tokens)), 9),
        "free_milliseconds": milliseconds(lambda: held.pop().free(), 9),
    }


def grow_by_texts(num_blocks: int) -> dict[str, float]:
    """Keep texts of 1,000 blocks until there are `num_blocks`; return the microseconds a block that one more takes."""
    block_size = 4
    prefixes = PrefixCache(BlockPool(CacheSpec([SMALL]), num_blocks, block_size))
    texts = [random_text(block_size * TEXT_BLOCKS) for _ in range(num_blocks // TEXT_BLOCKS)]
    for text in texts:
        store(prefixes, text)
    found = [texts[index % len(texts)] for index in range(0, 9 * 7, 7)]
    look_up = statistics.median(seconds(lambda text=text: prefixes.lookup(text)) for text in found)  # type: ignore[misc]
    evict = statistics.median(seconds(lambda: prefixes.evict(TEXT_BLOCKS // 9)) for _ in range(9))
    prefixes.evict(TEXT_BLOCKS)
    keep = store(prefixes, random_text(block_size * TEXT_BLOCKS))
    return {
        "lookup_microseconds": look_up / TEXT_BLOCKS * 1e6,
        "keep_microseconds": keep / TEXT_BLOCKS * 1e6,
        "evict_microseconds": evict / (TEXT_BLOCKS // 9) * 1e6,
    }


def grow_by_children(num_blocks: int) -> dict[str, float]:
    """Give one parent `num_blocks` children; return the microseconds that one takes to find, to add and to remove."""
    root = Root(b"", b"")
    contents = [random.randbytes(8 * 16) for _ in range(num_blocks + 200)]
    waiting, contents = contents[:200], contents[200:]
    for content in sorted(contents):  # each at the end
        root.add(content, 16)
    found = random.choices(contents, k=200)
    nodes = [root.child(content) for content in found[:100]]
    return {
        "lookup_microseconds": seconds(lambda: [root.child(content) for content in found]) / 200 * 1e6,
        "keep_microseconds": seconds(lambda: [root.add(content, 16) for content in waiting]) / 200 * 1e6,
        "evict_microseconds": seconds(lambda: [node.remove() for node in {*nodes} if node]) / 100 * 1e6,
    }


def growth(largest: int) -> list[dict[str, Any]]:
    sizes = [size for size in (1_000, 10_000, 100_000, 1_000_000) if size <= largest]
    shapes = {"texts of 1,000 blocks": grow_by_texts, "children of one parent": grow_by_children}
    return [{"blocks": size, "shape": shape, **measured(size)} for shape, measured in shapes.items() for size in sizes]


class Pooled:
    """A model over a pool, one prompt at a time."""

    def __init__(self, model: Any, num_tokens: int) -> None:
        spec = CacheSpec.from_config(model.config)
        self.pool = BlockPool(spec, 4 * num_tokens // 64 + 4, storage=model.dtype)
        self.prefixes = PrefixCache(self.pool, model)
        self.model = model

    def first_token(self, prompt: list[int], max_reused: int | None = None) -> tuple[float, Sequence]:
        """Return the seconds to a prompt's first token, the look-up included."""
        start = time.perf_counter()
        sequence = self.prefixes.acquire(prompt, max_reused=max_reused)
        self.step(sequence, prompt[sequence.seq_len :])
        return time.perf_counter() - start, sequence

    def step(self, sequence: Sequence, tokens: list[int]) -> int:
        with self.pool.step([sequence], [tokens]) as step:
            return int(forward_step(self.model, step).argmax())


@torch.no_grad()
def of_model(dtype: str, shared: int, rounds: int) -> dict[str, Any]:
    model, tokenizer = load_model("smollm2", dtype=dtype)
    text = tokenizer(TEXT.read_text(encoding="utf-8"), verbose=False)["input_ids"]
    system, own = text[:shared], [text[shared + OWN * turn :][:OWN] for turn in range(rounds + 1)]
    times: dict[str, list[float]] = {name: [] for name in ("found", "whole", "step", "peer", "copied")}
    whole_cache = DynamicCache(config=model.config)
    model(torch.tensor([system]), **{CACHE_ARGUMENT: whole_cache})
    pooled = Pooled(model, shared + OWN)
    guard = milliseconds(lambda: pooled.prefixes.lookup([1]), 21)
    pooled.first_token(system + own[-1])[1].free()
    for turn in range(rounds):
        prompt = system + own[turn]
        with use_attention(model):
            duration, sequence = pooled.first_token(prompt)
            times["found"].append(duration)
            times["step"] += [seconds(lambda seq=sequence: pooled.step(seq, [1])) for _ in range(3)]  # type: ignore[misc]
            sequence.free()
            duration, sequence = pooled.first_token(prompt, max_reused=0)
            times["whole"].append(duration)
            sequence.free()
        ids = torch.tensor([prompt])
        times["peer"].append(seconds(lambda ids=ids: model(ids, use_cache=True, logits_to_keep=1)))  # type: ignore[misc]

        def with_copy(ids: torch.Tensor = ids) -> None:
            cache = copy.deepcopy(whole_cache)
            model(ids[:, shared:], logits_to_keep=1, **{CACHE_ARGUMENT: cache})

        times["copied"].append(seconds(with_copy))
    medians = {f"{name}_milliseconds": statistics.median(values) * 1e3 for name, values in times.items()}
    return {
        "dtype": dtype,
        "prompt_tokens": shared + OWN,
        "shared_tokens": shared,
        "guard_milliseconds": guard,
        **medians,
    }


def report(lookups: list[dict[str, Any]], grown: list[dict[str, Any]], models: list[dict[str, Any]]) -> str:
    lines = [
        "| tokens | block size | layers | look-up, ms | acquire, ms | free, ms |",
        "|---|---|---|---|---|---|",
        *(
            f"| {row['tokens']:,} | {row['block_size']} "
            f"| {'full' if row['window'] is None else 'full and sliding'} | {row['lookup_milliseconds']:.1f} "
            f"| {row['acquire_milliseconds']:.1f} | {row['free_milliseconds']:.1f} |"
            for row in lookups
        ),
        "",
        "| blocks kept | as | find one, us | keep one, us | evict one, us |",
        "|---|---|---|---|---|",
        *(
            f"| {row['blocks']:,} | {row['shape']} | {row['lookup_microseconds']:.1f} | {row['keep_microseconds']:.1f} "
            f"| {row['evict_microseconds']:.1f} |"
            for row in grown
        ),
        "",
        "| weights | prompt | found | first token, ms | whole prompt, ms | | a step, ms | look at the weights, ms "
        "| transformers, ms | behind a copied cache, ms |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(
            f"| {row['dtype']} | {row['prompt_tokens']:,} | {row['shared_tokens']:,} | {row['found_milliseconds']:.0f} "
            f"| {row['whole_milliseconds']:,.0f} | {row['whole_milliseconds'] / row['found_milliseconds']:.1f}x "
            f"| {row['step_milliseconds']:.0f} | {row['guard_milliseconds']:.1f} | {row['peer_milliseconds']:,.0f} "
            f"| {row['copied_milliseconds']:,.0f} |"
            for row in models
        ),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="What does a shared prefix cost to find, and what does it save?")
    parser.add_argument("--quick", action="store_true", help="smaller numbers, no bfloat16; writes no file")
    parser.add_argument("--dtype", nargs="*", default=["float32", "bfloat16"], help="of the weights")
    arguments = parser.parse_args()
    quick = arguments.quick
    random.seed(0)
    num_tokens, largest, shared, rounds = (10_000, 10_000, 100, 2) if quick else (100_000, 1_000_000, SHARED, 3)
    lookups = [look_up(num_tokens, size, window) for size in (16, 64) for window in (None, 1024)]
    grown = growth(largest)
    models = [of_model(dtype, shared, rounds) for dtype in (["float32"] if quick else arguments.dtype)]
    print(f"{machine()}.\n\n{report(lookups, grown, models)}")
    if not quick:
        RESULTS.parent.mkdir(exist_ok=True)
        results = {"machine": machine(), "lookups": lookups, "growth": grown, "models": models}
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
