"""What does it cost to append one token to a cache of a layer, and does that grow with what is stored?

All sides in one run: caches that write the new row beside the stored ones, and concatenation, which a hand-written
loop does and which copies every stored row. Times are medians; bytes are new memory that torch's operations asked for.

    pip install -c constraints.txt ".[bench]"
    python -m benchmarks.append

It takes a minute or two and 4 GB of memory, prints tables, and writes benchmarks/results/append.json and append.png.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track

from kvcache import BlockPool, CacheSpec, KVCache, LayerSpec
from tests.allocations import CountAllocations

from .machine import machine

LENGTHS = (64, 256, 1024, 4096, 16384, 65536, 131072)
HEADS, HEAD_DIM = 8, 128
ROUNDS = 15
APPENDS = 100  # of a round, where appending is cheap
BLOCK_SIZE = 16
FILL = 4096  # tokens stored at once while a side is built
RESULTS = Path(__file__).parent / "results" / "append.json"


class Side(Protocol):
    """One way to keep rows, holding the rows of some tokens; `append` stores one more."""

    appends: int  # how many in a row make one measurement

    def append(self) -> None: ...

    def undo(self) -> None:
        """Drop the tokens of one measurement."""


class Preallocated:
    """`KVCache.append`: the new row goes into a buffer that is already there."""

    appends = APPENDS

    def __init__(self, length: int, storage: str) -> None:
        self.cache = KVCache(1, HEADS, HEAD_DIM, length + self.appends, storage=storage)
        for rows in _rows(length):
            self.cache.append(*rows)
        self.k_new, self.v_new = next(_rows(1))

    def append(self) -> None:
        self.cache.append(self.k_new, self.v_new)

    def undo(self) -> None:
        self.cache.rollback(self.appends)


class Paged:
    """A `BlockPool` step of one sequence and one token: reserve, append, commit."""

    appends = APPENDS

    def __init__(self, length: int, storage: str) -> None:
        num_blocks = -(-(length + self.appends) // BLOCK_SIZE)
        spec = CacheSpec([LayerSpec(HEADS, HEAD_DIM)])
        self.pool = BlockPool(spec, num_blocks, BLOCK_SIZE, storage)
        self.sequence = self.pool.new_sequence()
        for rows in _rows(length):
            self._store(*rows)
        self.k_new, self.v_new = next(_rows(1))

    def append(self) -> None:
        self._store(self.k_new, self.v_new)

    def undo(self) -> None:
        self.sequence.rollback(self.appends)

    def _store(self, k: torch.Tensor, v: torch.Tensor) -> None:
        with self.pool.step([self.sequence], [[0] * k.shape[2]]) as step:
            step.append(0, k, v)


class Concatenated:
    """`torch.cat` of the stored rows and the new one: a new tensor each time, which nothing needs to undo."""

    def __init__(self, length: int) -> None:
        self.appends = min(APPENDS, max(1, 20_000 // length))
        self.k, self.v = (torch.cat(parts, dim=2) for parts in zip(*_rows(length), strict=True))
        self.k_new, self.v_new = next(_rows(1))

    def append(self) -> None:
        torch.cat([self.k, self.k_new], dim=2)
        torch.cat([self.v, self.v_new], dim=2)

    def undo(self) -> None:
        pass


# In the order in which they are measured: concatenation last, as it empties the processor's caches of everything else.
SIDES: dict[str, Callable[[int], Side]] = {
    "KVCache float32": partial(Preallocated, storage="float32"),
    "KVCache int8": partial(Preallocated, storage="int8"),
    "BlockPool float32": partial(Paged, storage="float32"),
    "concatenation": Concatenated,
}


def _rows(length: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the keys and values of `length` tokens in parts."""
    for start in range(0, length, FILL):
        k, v = torch.randn(2, 1, HEADS, min(FILL, length - start), HEAD_DIM)
        yield k, v


def seconds_an_append(side: Side) -> float:
    start = time.perf_counter()
    for _ in range(side.appends):
        side.append()
    elapsed = time.perf_counter() - start
    side.undo()
    return elapsed / side.appends


def new_bytes(side: Side) -> int:
    with CountAllocations() as counted:
        side.append()
    return counted.allocated


def measure_side(name: str, make: Callable[[int], Side]) -> list[dict[str, float | str]]:
    """Measure all lengths in turn, round by round, so that whatever else the machine does meets each of them."""
    sides = {length: make(length) for length in LENGTHS}
    times: dict[int, list[float]] = {length: [] for length in LENGTHS}
    for _ in track(range(ROUNDS), f"{name:<20}", console=Console(stderr=True)):
        for length, side in sides.items():
            times[length].append(seconds_an_append(side))
    return [
        {
            "side": name,
            "length": length,
            "microseconds": statistics.median(times[length]) * 1e6,
            "new_bytes": new_bytes(side),
        }
        for length, side in sides.items()
    ]


def growth(rows: list[dict[str, float | str]]) -> float:
    """Return the time at the greatest length over that at the smallest."""
    return rows[-1]["microseconds"] / rows[0]["microseconds"]


def report(results: dict[str, list[dict[str, float | str]]]) -> str:
    ratios = [f"{growth(rows):,.2f}x" for rows in results.values()]
    return "\n".join(
        [
            "Time in microseconds",
            *_table(results, "microseconds", ",.1f"),
            f"{f'{LENGTHS[-1]:,} over {LENGTHS[0]}':>15}" + "".join(f"{ratio:>18}" for ratio in ratios),
            "\nNew memory in bytes",
            *_table(results, "new_bytes", ","),
        ]
    )


def _table(results: dict[str, list[dict[str, float | str]]], column: str, form: str) -> list[str]:
    lines = [f"{'tokens stored':>15}" + "".join(f"{name:>18}" for name in results)]
    for length, *rows in zip(LENGTHS, *results.values(), strict=True):
        lines.append(f"{length:>15,}" + "".join(f"{row[column]:>18{form}}" for row in rows))
    return lines


def plot(results: dict[str, list[dict[str, float | str]]], path: Path) -> None:
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for (name, rows), marker in zip(results.items(), "os^Dv", strict=False):
        axes.plot(LENGTHS, [row["microseconds"] for row in rows], marker=marker, linewidth=2, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(LENGTHS, [f"{length:,}" for length in LENGTHS])
    axes.set_xlabel("tokens stored")
    axes.set_ylabel("time to append one token (microseconds)")
    axes.set_title(f"Appending one token to one layer ({HEADS} heads of {HEAD_DIM})")
    axes.yaxis.set_major_formatter(lambda microseconds, _: f"{microseconds:,.0f}")
    axes.set_ylim(bottom=10)
    axes.grid(which="major", alpha=0.3)
    axes.legend(frameon=False)
    figure.supxlabel(f"{machine()}; medians", fontsize="small", color="dimgray")
    figure.savefig(path, dpi=150)


def main() -> None:
    results = {name: measure_side(name, make) for name, make in SIDES.items()}
    print(f"Append one token to one layer, {HEADS} heads of {HEAD_DIM}. {machine()}.\n")
    print(report(results))
    RESULTS.parent.mkdir(exist_ok=True)
    data = {
        "machine": machine(),
        "rows": [row for rows in results.values() for row in rows],
        "growth": {name: growth(rows) for name, rows in results.items()},
    }
    RESULTS.write_text(json.dumps(data, indent=2) + "\n")
    plot(results, RESULTS.with_suffix(".png"))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
