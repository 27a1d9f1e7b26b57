"""What does it cost to append one token to a cache of a layer, and does that grow with what is stored?

Both sides in one run: `KVCache.update` and concatenation (what a hand-written loop does). Times are
medians; bytes are new memory that torch's operations asked for.

    python -m benchmarks.append
"""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kvcache import KVCache
from tests.allocations import CountAllocations

LENGTHS = (30, 300, 3_000, 30_000)
HEADS, HEAD_DIM = 8, 128
STEPS, ROUNDS = 200, 15
RESULTS = Path(__file__).parent / "results" / "append.json"


def seconds(act: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        act()
    return (time.perf_counter() - start) / repeats


class Side:
    """One length: a filled cache, the same rows as plain tensors, and the times measured so far."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.k_new = self.v_new = torch.randn(1, HEADS, 1, HEAD_DIM)
        self.k, self.v = torch.randn(2, 1, HEADS, length, HEAD_DIM)
        self.cache = KVCache(1, HEADS, HEAD_DIM, length + STEPS)
        self.cache.append(self.k, self.v)
        self.update_times: list[float] = []
        self.concatenate_times: list[float] = []

    def update(self) -> None:
        self.cache.update(self.k_new, self.v_new)

    def concatenate(self) -> None:
        torch.cat([self.k, self.k_new], dim=2)
        torch.cat([self.v, self.v_new], dim=2)

    def results(self) -> dict[str, float]:
        with CountAllocations() as update_bytes:
            self.update()
        with CountAllocations() as concatenate_bytes:
            self.concatenate()
        return {
            "length": self.length,
            "update_microseconds": statistics.median(self.update_times) * 1e6,
            "concatenate_microseconds": statistics.median(self.concatenate_times) * 1e6,
            "update_bytes": update_bytes.allocated,
            "concatenate_bytes": concatenate_bytes.allocated,
        }


def measure() -> list[dict[str, float]]:
    sides = [Side(length) for length in LENGTHS]
    # All updates before the first concatenation, which empties the processor's caches of everything else.
    for _ in range(ROUNDS):
        for side in sides:
            side.update_times.append(seconds(side.update, STEPS))
            side.cache.rollback(STEPS)
    for _ in range(ROUNDS):
        for side in sides:
            side.concatenate_times.append(seconds(side.concatenate, 3))
    return [side.results() for side in sides]


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


def main() -> None:
    rows = measure()
    machine = f"{cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    print(f"Append one token, float32, {HEADS} heads of {HEAD_DIM}; {machine}\n")
    print(f"{'stored':>8} {'KVCache.update':>16} {'new bytes':>10} {'concatenate':>14} {'new bytes':>12}")
    for row in rows:
        print(
            f"{row['length']:>8,} {row['update_microseconds']:>13.1f} us {row['update_bytes']:>10,} "
            f"{row['concatenate_microseconds']:>11.1f} us {row['concatenate_bytes']:>12,}"
        )
    ratio = rows[-1]["update_microseconds"] / rows[0]["update_microseconds"]
    print(f"\nKVCache.update at {LENGTHS[-1]:,} over {LENGTHS[0]}: {ratio:.2f}x")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
