"""How much of a decoding step is Python? The time of calls with the native kernels in them, and without.

In the second column the kernels are replaced by functions that do nothing, so that what is left is Python and the
tensors that it makes. Of `attend` the third column is also what a call takes beyond the bare call of the binding.
Times are in microseconds, of one thread: medians, and in brackets what the fastest tenth of the calls stay under. On a
machine that others share the second says more: it is the time of a core that nobody else was using.

    pip install -c constraints.txt ".[bench]"
    python -m benchmarks.overhead

It takes half a minute and prints a table.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from kvcache import BlockPool, CacheSpec, KVCache, LayerSpec, attend, native

from .machine import machine

LAYERS, SEQUENCES, HEADS, HEAD_DIM = 32, 8, 8, 128
LENGTH = 64  # tokens that each sequence holds at first
STEPS = 200
CALLS = 2000
BLOCK_SIZE = 16


@contextmanager
def without_kernels() -> Iterator[None]:
    """Replace the kernels by functions that do nothing."""
    kernels = native.kernels
    native.kernels = SimpleNamespace(append=_nothing, attend=_nothing)
    try:
        yield
    finally:
        native.kernels = kernels


def _nothing(*arguments: Any) -> None:
    pass


class Time(NamedTuple):
    """Microseconds."""

    median: float
    quiet: float

    def __sub__(self, other: "Time") -> "Time":
        return Time(self.median - other.median, self.quiet - other.quiet)

    def __truediv__(self, count: int) -> "Time":
        return Time(self.median / count, self.quiet / count)

    def __format__(self, digits: str) -> str:
        return f"{self.median:{digits}} ({self.quiet:{digits}})".rjust(20)


def time_of(call: Callable[[], object], times: int) -> Time:
    """Return the time of a call."""
    durations = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        durations.append(time.perf_counter() - start)
    return Time(statistics.median(durations) * 1e6, statistics.quantiles(durations, n=10)[0] * 1e6)


def with_and_without(call: Callable[[], object], times: int) -> tuple[Time, Time]:
    call()
    whole = time_of(call, times)
    with without_kernels():
        return whole, time_of(call, times)


def pool_step(storage: str) -> Callable[[], None]:
    """Return a step of one new token for each sequence: made, appended and attended layer by layer, committed."""
    num_blocks = SEQUENCES * -(-(LENGTH + 2 * STEPS + 1) // BLOCK_SIZE)
    pool = BlockPool(CacheSpec([LayerSpec(HEADS, HEAD_DIM)] * LAYERS), num_blocks, BLOCK_SIZE, storage)
    sequences = [pool.new_sequence() for _ in range(SEQUENCES)]
    new = [[1]] * SEQUENCES
    q, k, v = torch.randn(3, 1, HEADS, SEQUENCES, HEAD_DIM)

    def step(tokens: list[list[int]], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        with pool.step(sequences, tokens) as step:
            for layer in range(LAYERS):
                step.append(layer, k, v)
                step.attend(layer, q)

    step([[1] * LENGTH] * SEQUENCES, *torch.randn(3, 1, HEADS, SEQUENCES * LENGTH, HEAD_DIM))
    return lambda: step(new, q, k, v)


def cache_append(storage: str) -> Callable[[], None]:
    cache = KVCache(1, HEADS, HEAD_DIM, LENGTH + 2 * CALLS + 1, storage=storage)
    k, v = torch.randn(2, 1, HEADS, 1, HEAD_DIM)
    cache.append(*torch.randn(2, 1, HEADS, LENGTH, HEAD_DIM))
    return lambda: cache.append(k, v)


def beyond_the_binding() -> tuple[Time, Time, Time]:
    """Return what `attend` takes in all, without the kernel, and beyond the binding called with the same pointers."""
    q = torch.randn(1, HEADS, 1, HEAD_DIM)
    k, v = torch.randn(2, 1, HEADS, LENGTH, HEAD_DIM)
    whole, python = with_and_without(lambda: attend(q, k, v), CALLS)
    kernels, calls = native.kernels, []
    native.kernels = SimpleNamespace(append=_nothing, attend=lambda *arguments: calls.append(arguments))
    try:
        output = attend(q, k, v)  # held, since the pointers name it
    finally:
        native.kernels = kernels
    assert kernels is not None
    bare = time_of(lambda: kernels.attend(*calls[0]), CALLS)
    del output
    return whole, python, whole - bare


def main() -> None:
    if native.kernels is None:
        raise SystemExit(f"the native kernels are not there: {native.missing_because}")
    torch.set_num_threads(1)
    print(f"{HEADS} heads of {HEAD_DIM}, {LENGTH} tokens stored. {machine()}.\n")
    print(f"{'microseconds':<52}{'in all':>20}{'Python':>20}{'beyond the binding':>20}")
    for storage in ("float32", "int8"):
        whole, python = with_and_without(pool_step(storage), STEPS)
        print(f"{f'step, {LAYERS} layers, {SEQUENCES} sequences, {storage}':<52}{whole:,.0f}{python:,.0f}")
        print(f"{'    of that, a layer':<52}{whole / LAYERS:,.1f}{python / LAYERS:,.1f}")
    for storage in ("float32", "int8"):
        whole, python = with_and_without(cache_append(storage), CALLS)
        print(f"{f'KVCache.append, one token, {storage}':<52}{whole:,.1f}{python:,.1f}")
    whole, python, beyond = beyond_the_binding()
    print(f"{'attend, one query':<52}{whole:,.1f}{python:,.1f}{beyond:,.1f}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
