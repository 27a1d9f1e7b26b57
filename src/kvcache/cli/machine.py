"""How fast the memory of the machine at hand can be read."""

import time
from collections.abc import Callable

import torch

from kvcache.memory import free_memory

READ_NBYTES = 512 << 20  # much more than processors cache
ROUNDS = 5

_WAYS_TO_READ: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    lambda a, b: a.sum() + b.sum(),
    torch.dot,
)


def measure_bandwidth() -> float:
    """Return the bytes a second at which all of torch's threads read float32 numbers: the best of a few times."""
    nbytes = min(READ_NBYTES, (free_memory() or READ_NBYTES) // 4)
    a, b = torch.ones(2, max(1, nbytes // 8)).unbind()
    best = float("inf")
    for _ in range(ROUNDS):
        for read in _WAYS_TO_READ:
            start = time.perf_counter()
            read(a, b)
            best = min(best, time.perf_counter() - start)
    return (a.nbytes + b.nbytes) / best
