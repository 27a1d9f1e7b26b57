"""How close does the attention of one new token come to the time that reading its keys and values takes?

A step's query needs every stored key and value once, so no step is faster than memory. Each time is given over that
limit, (bytes of the keys and values) / (read bandwidth), for every storage, for blocks of several sizes in random
order and for one block a sequence. Beside it, in the same run, what else PyTorch offers.

    pip install -c constraints.txt ".[bench]"
    python -m benchmarks.attention            # some minutes, 9 GB of memory
    python -m benchmarks.attention --quick    # one shape, few rounds; writes no files

It prints tables, and writes benchmarks/results/attention.json and, through attention_plot.py, attention.png.

Bandwidth: all of torch's threads read 2 GiB in several ways: sums of float32 and of int64, a matrix times a vector, a
dot product. The fastest of them is then measured before each shape in each round. The limit takes the median of a
shape's measurements; the best of them is reported beside it.

What a call reads is not in the processor's caches: each storage has 2^28 numbers of keys and of values, a call takes
the next tokens of them, and all storages take turns, so that between two reads of the same bytes more than 2 GB are
read. All cases of all shapes take turns too, round by round, so that whatever else the machine does meets each of them.
Times are medians over the rounds. Queries have the storage's dtype, bfloat16 for int8 and int4.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch.nn.functional import scaled_dot_product_attention

from kvcache import attend

from .attention_plot import OURS, RESULTS, plot
from .machine import machine
from .memory import Memory, Reader

STORAGES = ("float32", "bfloat16", "float16", "int8", "int8/int4", "int4")
FLOATS = STORAGES[:3]  # what PyTorch can read
BASELINE = "bfloat16"  # whose times those of encoded storages are compared with
BLOCK_SIZES = (16, 64, 256, None)  # None: one block a sequence, a plain tensor
CONTEXTS = (64, 256, 1024, 4096, 16384, 65536, 131072)
ROUNDS, QUICK_ROUNDS = 21, 3
SLOW_EVERY = 4  # rounds from one measurement of a slow side to the next


@dataclass(frozen=True)
class Shape:
    """One query a head, over `length` tokens in each sequence."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int

    def __str__(self) -> str:
        sequences = "1 sequence" if self.batch == 1 else f"{self.batch} sequences"
        return f"{sequences} of {self.length:,} tokens, {self.heads} heads over {self.kv_heads} of {self.head_dim}"


SHAPES = (
    Shape(1, 32, 8, 4096, 128),
    Shape(8, 32, 8, 2048, 128),
    Shape(1, 32, 8, 32768, 128),
    Shape(1, 9, 3, 8192, 64),
)
BY_CONTEXT = tuple(Shape(1, 32, 8, length, 128) for length in CONTEXTS)
LONG = SHAPES[2]  # where the storages are compared


def grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The query heads of a group as rows of one problem, which reads each key/value head once."""
    batch, heads, _, head_dim = q.shape
    rows = q.view(batch, k.shape[1], heads // k.shape[1], head_dim)
    return scaled_dot_product_attention(rows, k, v).view(q.shape)


def repeated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A key/value head for each query head, as in transformers."""
    group = q.shape[1] // k.shape[1]
    return scaled_dot_product_attention(q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1))


def concatenated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The new row joined to the stored ones; here the last one is taken for it."""
    k, v = (torch.cat([rows[:, :, :-1], rows[:, :, -1:]], dim=2) for rows in (k, v))
    return grouped(q, k, v)


SIDES: dict[str, Callable[..., torch.Tensor]] = {
    OURS: attend,
    "SDPA grouped": grouped,
    "SDPA enable_gqa": partial(scaled_dot_product_attention, enable_gqa=True),
    "repeat + SDPA": repeated,
    "concatenate + SDPA": concatenated,
}
SLOW = tuple(SIDES)[2:]


@dataclass(frozen=True)
class Case:
    """The attention of one side over one storage."""

    shape: Shape
    storage: str
    side: str = OURS
    block_size: int | None = None


@dataclass(frozen=True)
class Result:
    """The median time of a call, and what it says."""

    seconds: float
    nbytes: int  # of the keys and values
    bandwidth: float  # bytes a second that memory can be read with

    @property
    def speed(self) -> float:
        """Bytes of the keys and values a second."""
        return self.nbytes / self.seconds

    @property
    def over_limit(self) -> float:
        """The time over that of reading the keys and values once."""
        return self.bandwidth / self.speed


Results = dict[Case, Result]
Bandwidths = dict[Shape, list[float]]


def cases(shape: Shape) -> Iterator[Case]:
    """Yield the cases of a shape in the order in which they are measured: the storages take turns."""
    for block_size in BLOCK_SIZES:
        yield from (Case(shape, storage, block_size=block_size) for storage in STORAGES)
    if shape in SHAPES:
        for side in SIDES:
            yield from (Case(shape, storage, side) for storage in FLOATS if side != OURS)


def measure(shapes: Iterable[Shape], rounds: int, reader: Reader) -> tuple[Results, Bandwidths]:
    """Measure shapes of one head size and number of key/value heads in turn, round by round."""
    shapes = list(shapes)
    kv_heads, head_dim = shapes[0].kv_heads, shapes[0].head_dim
    memories = {storage: Memory(storage, kv_heads, head_dim) for storage in STORAGES}
    times: dict[Case, list[float]] = defaultdict(list)
    bandwidths: Bandwidths = defaultdict(list)
    steps = [(index, shape) for index in range(rounds) for shape in shapes]
    for index, shape in track(steps, f"{kv_heads} heads of {head_dim}", console=Console(stderr=True)):
        bandwidths[shape].append(reader.bandwidth())
        for case in cases(shape):
            if case.side not in SLOW or index % SLOW_EVERY == 0:
                times[case].append(seconds_a_call(case, memories[case.storage]))
    results = {
        case: Result(
            statistics.median(seconds),
            case.shape.batch * case.shape.length * memories[case.storage].token_nbytes,
            statistics.median(bandwidths[case.shape]),
        )
        for case, seconds in times.items()
    }
    return results, bandwidths


def seconds_a_call(case: Case, memory: Memory) -> float:
    shape, attention = case.shape, SIDES[case.side]
    dtype = getattr(torch, case.storage if case.storage in FLOATS else BASELINE)
    q = torch.randn(shape.batch, shape.heads, 1, shape.head_dim).to(dtype)
    stored = memory.take(shape.batch, shape.length, case.block_size)
    if case.side in SLOW:
        del stored[1:]
    start = time.perf_counter()
    for k, v, options in stored:
        attention(q, k, v, **options)
    return (time.perf_counter() - start) / len(stored)


def report(results: Results, bandwidths: Bandwidths) -> str:
    tables = [_shape_table(shape, results, bandwidths[shape]) for shape in bandwidths]
    return "\n\n".join([*tables, *_comparisons(results)])


def _shape_table(shape: Shape, results: Results, bandwidths: list[float]) -> str:
    median, best = statistics.median(bandwidths) / 1e9, max(bandwidths) / 1e9
    lines = [
        f"{shape} (memory: {median:.1f} GB/s, at best {best:.1f})",
        f"{OURS:<16}" + "".join(f"{_layout(block_size):^28}" for block_size in BLOCK_SIZES),
        f"{'':<16}" + f"{'ms':>9} {'GB/s':>6} {'limit':>8}    " * len(BLOCK_SIZES),
    ]
    for storage in STORAGES:
        row = [results[Case(shape, storage, block_size=block_size)] for block_size in BLOCK_SIZES]
        cells = (f"{r.seconds * 1e3:>9.3f} {r.speed / 1e9:>6.1f} {r.over_limit:>7.2f}x    " for r in row)
        lines.append(f"  {storage:<14}" + "".join(cells))
    if shape in SHAPES:
        lines.append(f"{'others':<16}" + "".join(f"{side:^28}" for side in tuple(SIDES)[1:]))
        lines.append(f"{'':<16}" + f"{'ms':>9} {'ours':>7} {'limit':>7}    " * (len(SIDES) - 1))
        for storage in FLOATS:
            ours = results[Case(shape, storage)]
            row = [results[Case(shape, storage, side)] for side in tuple(SIDES)[1:]]
            cells = (
                f"{r.seconds * 1e3:>9.3f} {r.seconds / ours.seconds:>6.1f}x {r.over_limit:>6.1f}x    " for r in row
            )
            lines.append(f"  {storage:<14}" + "".join(cells))
    return "\n".join(line.rstrip() for line in lines)


def _layout(block_size: int | None) -> str:
    return "one block" if block_size is None else f"blocks of {block_size}"


def growth(results: Results, storage: str, block_size: int | None) -> float | None:
    """Return the time at the longest context over that at the one before it, which is half as long."""
    before, longest = (results.get(Case(shape, storage, block_size=block_size)) for shape in BY_CONTEXT[-2:])
    return longest.seconds / before.seconds if before and longest else None


def over_baseline(results: Results, storage: str, block_size: int | None) -> float | None:
    """Return the time over bfloat16's, where storages are compared."""
    cases = (Case(LONG, name, block_size=block_size) for name in (storage, BASELINE))
    result, baseline = map(results.get, cases)
    return result.seconds / baseline.seconds if result and baseline else None


COMPARISONS: dict[str, Callable[[Results, str, int | None], float | None]] = {
    f"Time at {CONTEXTS[-1]:,} tokens over that at {CONTEXTS[-2]:,}": growth,
    f"Time over that of {BASELINE} at {LONG.length:,} tokens": over_baseline,
}


def _comparisons(results: Results) -> Iterator[str]:
    for title, compare in COMPARISONS.items():
        rows = {storage: [compare(results, storage, size) for size in BLOCK_SIZES] for storage in STORAGES}
        if None not in rows[BASELINE]:
            head = f"{'':<16}" + "".join(f"{_layout(block_size):>15}" for block_size in BLOCK_SIZES)
            lines = [f"  {name:<14}" + "".join(f"{ratio:>14.2f}x" for ratio in row) for name, row in rows.items()]
            yield "\n".join([title, head, *lines])


def results_file(results: Results, bandwidths: Bandwidths, reader: Reader) -> dict[str, Any]:
    return {
        "machine": machine(),
        "rounds": ROUNDS,
        "memory_read_by": reader.way,
        "limit": "the median bandwidth",
        "bandwidth": [
            {
                **asdict(shape),
                "median_gigabytes_per_second": statistics.median(speeds) / 1e9,
                "best_gigabytes_per_second": max(speeds) / 1e9,
            }
            for shape, speeds in bandwidths.items()
        ],
        "rows": [_row(case, result) for case, result in results.items()],
        "comparisons": {
            title: {
                storage: {_layout(block_size): compare(results, storage, block_size) for block_size in BLOCK_SIZES}
                for storage in STORAGES
            }
            for title, compare in COMPARISONS.items()
        },
    }


def _row(case: Case, result: Result) -> dict[str, Any]:
    return {
        **asdict(case.shape),
        "storage": case.storage,
        "side": case.side,
        "block_size": case.block_size,
        "milliseconds": result.seconds * 1e3,
        "bytes": result.nbytes,
        "gigabytes_per_second": result.speed / 1e9,
        "over_limit": result.over_limit,
    }


def dump(value: Any, indent: str = "") -> str:
    """Return JSON in which a list or an object of nothing but numbers and strings is one line."""
    parts = list(value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())
    if not any(isinstance(part, dict | list) for part in parts):
        return json.dumps(value)
    deeper = indent + "  "
    lines = [deeper + dump(part, deeper) for part in parts]
    if isinstance(value, dict):
        lines = [f"{deeper}{json.dumps(key)}: {dump(part, deeper)}" for key, part in value.items()]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n" + ",\n".join(lines) + f"\n{indent}{closing}"


def main() -> None:
    parser = argparse.ArgumentParser(description="How close does one new token's attention come to the memory limit?")
    parser.add_argument("--quick", action="store_true", help="one shape, few rounds; writes no files")
    quick = parser.parse_args().quick
    shapes = SHAPES[:1] if quick else tuple(dict.fromkeys((*BY_CONTEXT, *SHAPES)))
    reader = Reader()
    results: Results = {}
    bandwidths: Bandwidths = {}
    for _, alike in groupby(shapes, key=lambda shape: (shape.kv_heads, shape.head_dim)):
        measured = measure(alike, QUICK_ROUNDS if quick else ROUNDS, reader)
        results |= measured[0]
        bandwidths |= measured[1]
    print(f"Attention of one new token. {machine()}. Memory is read by {reader.way}.")
    print("limit: time over that of reading the keys and values once; ours: over kvcache.attend's with one block.\n")
    print(report(results, bandwidths))
    if not quick:
        data = results_file(results, bandwidths, reader)
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(dump(data) + "\n")
        plot(data, RESULTS.with_suffix(".png"))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
