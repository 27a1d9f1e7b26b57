"""Keys and values that are in memory and not in the processor's caches, and how fast memory can be read.

A `Memory` has 2^28 numbers of keys and as many of values in one storage: 2 GiB in float32, 320 MiB in int4. Each
measurement reads the next tokens of them. Where several storages take turns, what is read between two reads of the same
bytes is far more than a processor caches.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kvcache.storage.codecs import Codec, check_storage

NUMBERS = 1 << 28
TILE_ROWS = 1 << 15  # random rows, encoded once and repeated
SPAN = 64 << 20  # bytes that the calls of one measurement read, if a single one does not read more
LARGEST_BLOCK = 256

# Keys, values, and the other arguments of `attend`.
Stored = tuple[Any, Any, dict[str, torch.Tensor]]


class Memory:
    """The keys and values of one storage, read in turn."""

    def __init__(self, storage: str, kv_heads: int, head_dim: int) -> None:
        codecs = check_storage("storage", storage)
        self.codecs = (codecs.k, codecs.v)
        self.kv_heads, self.head_dim = kv_heads, head_dim
        self.rows = [_random_rows(codec, head_dim) for codec in self.codecs]
        self.token_nbytes = kv_heads * sum(codec.nbytes(head_dim) for codec in self.codecs)
        self.num_tokens = NUMBERS // head_dim // kv_heads // LARGEST_BLOCK * LARGEST_BLOCK
        self.position = 0  # the token after those that were taken last

    def take(self, batch: int, length: int, block_size: int | None = None) -> list[Stored]:
        """Return what the calls of one measurement read, no two the same bytes: `length` tokens of `batch` sequences.

        Without `block_size` plain tensors (B, Hkv, L, D); else blocks (num_blocks, Hkv, block_size, D), of which each
        call's `block_table` names some in random order.
        """
        num_tokens = max(batch * length, SPAN // self.token_nbytes)
        num_tokens = -(-num_tokens // LARGEST_BLOCK) * LARGEST_BLOCK
        start = self.position if self.position + num_tokens <= self.num_tokens else 0
        self.position = start + num_tokens
        if block_size is None:
            return list(self._tensors(batch, length, start, num_tokens))
        return list(self._blocks(batch, length, block_size, start, num_tokens))

    def _tensors(self, batch: int, length: int, start: int, num_tokens: int) -> Iterator[Stored]:
        tokens = batch * length
        for first in range(start, start + num_tokens - tokens + 1, tokens):
            yield *self._readable(first, tokens, length), {}

    def _blocks(self, batch: int, length: int, block_size: int, start: int, num_tokens: int) -> Iterator[Stored]:
        k, v = self._readable(0, self.num_tokens, block_size)
        lengths = torch.full((batch,), length)
        blocks = torch.randperm(num_tokens // block_size) + start // block_size
        blocks_each = -(-length // block_size)  # of a sequence
        calls = len(blocks) // (batch * blocks_each)
        for table in blocks[: calls * batch * blocks_each].view(calls, batch, blocks_each):
            yield k, v, {"block_table": table, "lengths": lengths}

    def _readable(self, first: int, tokens: int, block_size: int) -> list[Any]:
        """Return keys and values of some tokens as `attend` takes them, (tokens / block_size, Hkv, block_size, D)."""
        part = slice(first * self.kv_heads, (first + tokens) * self.kv_heads)
        return [
            codec.readable(rows[part].view(-1, self.kv_heads, block_size, rows.shape[1]), self.head_dim)
            for codec, rows in zip(self.codecs, self.rows, strict=True)
        ]


def _random_rows(codec: Codec, head_dim: int) -> torch.Tensor:
    tile = codec.encode(torch.randn(TILE_ROWS, head_dim))
    return tile.repeat(NUMBERS // head_dim // TILE_ROWS, 1)


class Reader:
    """Reads 2 GiB of numbers of its own, in the fastest of several ways that use all threads."""

    def __init__(self, rounds: int = 5) -> None:
        tile = torch.randn(TILE_ROWS)
        self.halves = [tile.repeat(NUMBERS // TILE_ROWS) for _ in range(2)]
        self.nbytes = sum(half.nbytes for half in self.halves)
        speeds = [(self.bandwidth(way), way) for _ in range(rounds) for way in WAYS_TO_READ]
        self.way = max(speeds)[1]

    def bandwidth(self, way: str | None = None) -> float:
        """Return bytes a second of one read of everything."""
        read = WAYS_TO_READ[way or self.way]
        start = time.perf_counter()
        read(*self.halves)
        return self.nbytes / (time.perf_counter() - start)


def _matrix_times_ones(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.view(-1, 4096) @ torch.ones(4096)


WAYS_TO_READ: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "sum of float32": lambda a, b: (a.sum(), b.sum()),
    "sum of int64": lambda a, b: (a.view(torch.int64).sum(), b.view(torch.int64).sum()),
    "matrix times vector": lambda a, b: (_matrix_times_ones(a), _matrix_times_ones(b)),
    "dot product": torch.dot,
}
