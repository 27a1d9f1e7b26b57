"""What the machine at hand has for decoding: free memory, and how fast that can be read."""

import time
from collections.abc import Callable
from pathlib import Path

import torch

READ_NBYTES = 512 << 20  # much more than processors cache
ROUNDS = 5
CGROUP = Path("/sys/fs/cgroup")

_WAYS_TO_READ: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    lambda a, b: a.sum() + b.sum(),
    torch.dot,
)


def free_memory() -> int:
    """Return the bytes that new programs can have without swapping; in a container no more than it may take."""
    import psutil

    available = int(psutil.virtual_memory().available)
    try:
        limit = int((CGROUP / "memory.max").read_text())  # "max" where there is none
        used = int((CGROUP / "memory.current").read_text())
        statistics = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return available
    reclaimable = int(statistics.get("inactive_file", 0))  # the files' cache, which goes where memory is short
    return max(1, min(available, limit - used + reclaimable))


def measure_bandwidth() -> float:
    """Return the bytes a second at which all of torch's threads read float32 numbers: the best of a few times."""
    nbytes = min(READ_NBYTES, free_memory() // 4)
    a, b = torch.ones(2, max(1, nbytes // 8)).unbind()
    best = float("inf")
    for _ in range(ROUNDS):
        for read in _WAYS_TO_READ:
            start = time.perf_counter()
            read(a, b)
            best = min(best, time.perf_counter() - start)
    return (a.nbytes + b.nbytes) / best
