"""Reads a range of slots out of a store: a view where a tensor holds them as they are asked for, else one copy."""

import torch

from kvcache.attention.encoded import Store, decode_data, stored_data
from kvcache.errors import InvalidValueError


def read_slots(
    store: Store, block_table: torch.Tensor | None, rows: slice, slots: slice, dtype: torch.dtype
) -> torch.Tensor:
    """Return some slots of some sequences as numbers (B, Hkv, n, D) of `dtype`.

    Args:
        store: rows (B, Hkv, S, D); with `block_table`, blocks (num_blocks, Hkv, block_size, D).
        block_table: (B, M) int64 or None. Only the entries of blocks with a slot that is asked for are read.
        rows: which sequences.
        slots: which slots; at least one.
        dtype: floating.

    Raises:
        InvalidValueError: an entry that is read is not a block of the store.
    """
    data = stored_data(store)
    if block_table is None:
        return decode_data(store, data[rows, :, slots], dtype)
    block_size = data.shape[2]
    first = slots.start // block_size
    table = block_table[rows, first : -(-slots.stop // block_size)]
    check_entries(table, data.shape[0])
    start, stop = slots.start - first * block_size, slots.stop - first * block_size
    return decode_data(store, join_blocks(data, table)[:, :, start:stop], dtype)


def check_entries(entries: torch.Tensor, num_blocks: int) -> None:
    """Check that the entries of a block table that are needed are blocks of the store."""
    outside = (entries < 0) | (entries >= num_blocks)
    if outside.any():
        bad = int(entries[outside][0])
        raise InvalidValueError(f"block_table holds {bad}; expected a block in [0, {num_blocks})")


def join_blocks(data: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return blocks (B, M) out of (num_blocks, Hkv, block_size, W), joined to a copy (B, Hkv, M * block_size, W)."""
    num_blocks, kv_heads, block_size, width = data.shape
    if not data.is_contiguous():
        return data[table].transpose(1, 2).flatten(2, 3)
    # The rows of one head in a block lie side by side: fetched in the order that is wanted, they are copied once.
    wanted = table[:, None] * kv_heads + torch.arange(kv_heads, device=table.device)[:, None]  # (B, Hkv, M)
    fetched = data.view(num_blocks * kv_heads, block_size * width).index_select(0, wanted.flatten())
    return fetched.view(table.shape[0], kv_heads, -1, width)
