"""The tensors of one layer: blocks of key rows and blocks of value rows, each as its codec keeps it.

    k   (num_blocks, Hkv, block_size, width)      one row: the key of one token and head, encoded
    v   (num_blocks, Hkv, block_size, width)

A preallocated cache is the case of one block a sequence, and a window one block that is written round and round; a
pool has many small blocks. Who holds which block is not known here.
"""

from collections.abc import Sequence
from typing import Self

import torch

from kvcache.attention.encoded import Store
from kvcache.storage.codecs import Storage
from kvcache.storage.native_append import append_rows, kernel_format
from kvcache.storage.specs import LayerSpec


class BlockStore:
    """Blocks of keys and values of one layer, zero when new."""

    def __init__(
        self, layer: LayerSpec, num_blocks: int, block_size: int, storage: Storage, device: torch.device
    ) -> None:
        self.layer = layer
        self.storage = storage
        self.formats = kernel_format(storage.k), kernel_format(storage.v)
        # A tensor made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            k, v = (
                torch.zeros(
                    num_blocks, layer.num_heads, block_size, codec.width(head_dim), dtype=codec.dtype, device=device
                )
                for codec, head_dim in zip((storage.k, storage.v), layer.head_dims, strict=True)
            )
        self._keep(k, v)

    @property
    def num_blocks(self) -> int:
        """How many blocks there are."""
        return self.k.shape[0]

    @property
    def block_size(self) -> int:
        """Rows of a block, for each head."""
        return self.k.shape[2]

    @property
    def device(self) -> torch.device:
        """Where the blocks are."""
        return self.k.device

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self.k.nbytes + self.v.nbytes

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys (..., D) and values (..., Dv), detached, as they are kept (..., width)."""
        return self.storage.k.encode(k.detach()), self.storage.v.encode(v.detach())

    def write(self, k: torch.Tensor, v: torch.Tensor, start: int) -> None:
        """Encode keys (num_blocks, Hkv, T, D) and values (..., Dv) into the T rows of each block from `start` on.

        Shapes must be checked, and that the rows are there.
        """
        if not append_rows(self, k, v, start):
            self.put(*self.encode(k, v), start)

    def put(self, k: torch.Tensor, v: torch.Tensor, start: int) -> None:
        """Copy kept rows (num_blocks, Hkv, T, width) into the T rows of each block from `start` on."""
        for blocks, rows in ((self.k, k), (self.v, v)):
            blocks[:, :, start : start + rows.shape[2]].copy_(rows)

    def scatter(self, k: torch.Tensor, v: torch.Tensor, blocks: torch.Tensor, rows: torch.Tensor) -> None:
        """Encode keys (B, Hkv, T, D) and values (..., Dv) into rows of any blocks.

        Token t of sequence b, n = b * T + t, goes to row `rows[n]` of block `blocks[n]`. Shapes must be checked, and
        that the rows are there. `blocks` and `rows` are int64 (B * T,), contiguous.
        """
        if not append_rows(self, k, v, 0, blocks, rows):
            self.place(*self.encode(k, v), blocks, rows)

    def place(self, k: torch.Tensor, v: torch.Tensor, blocks: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy kept rows (B, Hkv, T, width) to where `scatter` would have them."""
        for target, source in ((self.k, k), (self.v, v)):
            target[blocks, :, rows] = source.transpose(1, 2).flatten(0, 1)

    def decode(self, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return kept rows as keys and values of `dtype`; themselves where nothing changes."""
        k_dim, v_dim = self.layer.head_dims
        return self.storage.k.decode(k, k_dim, dtype), self.storage.v.decode(v, v_dim, dtype)

    def readable(self, k: torch.Tensor, v: torch.Tensor) -> tuple[Store, Store]:
        """Return kept rows (N, Hkv, S, width) as `attend` takes them, undecoded."""
        k_dim, v_dim = self.layer.head_dims
        return self.storage.k.readable(k, k_dim), self.storage.v.readable(v, v_dim)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks."""
        from_blocks, to_blocks = (torch.tensor(blocks, device=self.device) for blocks in (sources, targets))
        for rows in (self.k, self.v):
            rows[to_blocks] = rows[from_blocks]

    def empty_like(self, num_blocks: int) -> Self:
        """Return new blocks of the same form."""
        return type(self)(self.layer, num_blocks, self.block_size, self.storage, self.device)

    def picked(self, blocks: Sequence[int]) -> Self:
        """Return copies of these blocks, in this order."""
        other = self.empty_like(0)
        index = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        with torch.inference_mode(False):
            other._keep(self.k.index_select(0, index), self.v.index_select(0, index))
        return other

    def grow(self, num_blocks: int) -> None:
        """Let there be `num_blocks`, at least as many as now, in place: the first hold what they held."""
        num_more = num_blocks - self.num_blocks
        with torch.inference_mode(False):
            k, v = (torch.cat([rows, rows.new_zeros(num_more, *rows.shape[1:])]) for rows in (self.k, self.v))
        self._keep(k, v)

    def to(self, device: torch.device) -> None:
        """Move all blocks, in place."""
        with torch.inference_mode(False):
            self._keep(self.k.to(device), self.v.to(device))

    def _keep(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self.k, self.v = k, v
        self.all_blocks = self.readable(k, v)  # as `attend` takes them; made once, a step asks in every layer
