"""New rows into blocks through the native kernel: encoded and stored in one call, with the bits that the codecs give.

It takes pointers, so an eager call goes to it directly; under `torch.compile` the same call is one operation of the
graph, which writes the blocks in place.
"""

from typing import Any, Protocol

import torch
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling

from kvcache import native
from kvcache.storage.codecs import Codec, FloatCodec

BEST = -1  # of native.kernels.INSTRUCTION_SETS


class Blocks(Protocol):
    """The part of a `BlockStore` that is written."""

    k: torch.Tensor  # (num_blocks, Hkv, block_size, width)
    v: torch.Tensor
    formats: tuple[int | None, int | None]  # of `kernel_format`, for keys and values


def kernel_format(codec: Codec) -> int | None:
    """Return the kernel's number for a codec, None for one that it does not know."""
    return native.FORMATS.get(codec.dtype if isinstance(codec, FloatCodec) else codec.name)


def append_rows(
    store: Blocks,
    k: torch.Tensor,  # (B, Hkv, T, D)
    v: torch.Tensor,  # (B, Hkv, T, Dv)
    start: int,
    blocks: torch.Tensor | None = None,  # (B * T,) int64
    rows: torch.Tensor | None = None,
) -> bool:
    """Store new rows, if the kernel serves them, and return whether it did; otherwise nothing is changed.

    Token t of sequence b goes to row `start + t` of block b, or to row `rows[b * T + t]` of block `blocks[b * T + t]`.
    Shapes and places must be checked: the kernel checks none.
    """
    k_format, v_format = store.formats
    if (
        native.kernels is None  # of which `attend` warns
        or k_format is None
        or v_format is None
        or not store.k.is_cpu
        or k.dtype not in native.FORMATS
        or v.dtype not in native.FORMATS
        or k.stride(3) != 1
        or v.stride(3) != 1
    ):
        return False
    if is_compiling():
        k, v = k.detach(), v.detach()
        _append_in_graph(store.k, store.v, k_format, v_format, k, v, start, blocks, rows)
        return True
    if not native.have_memory(k, v, store.k, store.v):
        return False
    _append(store.k, store.v, k_format, v_format, k, v, start, blocks, rows)
    increment_version((store.k, store.v))  # so that a backward that needs what was there before says so
    return True


def _append(
    k_blocks: torch.Tensor,
    v_blocks: torch.Tensor,
    k_format: int,
    v_format: int,
    k: torch.Tensor,
    v: torch.Tensor,
    start: int,
    blocks: torch.Tensor | None,
    rows: torch.Tensor | None,
) -> None:
    assert native.kernels is not None
    stores = k_blocks, v_blocks
    k, v = _apart_from(stores, k), _apart_from(stores, v)
    native.kernels.append(
        BEST,
        k.data_ptr(),
        native.FORMATS[k.dtype],
        k.shape,
        k.stride(),
        v.data_ptr(),
        native.FORMATS[v.dtype],
        v.shape,
        v.stride(),
        k_blocks.data_ptr(),
        k_format,
        k_blocks.stride(),
        v_blocks.data_ptr(),
        v_format,
        v_blocks.stride(),
        0 if blocks is None else blocks.data_ptr(),
        0 if rows is None else rows.data_ptr(),
        start,
        torch.get_num_threads(),
    )


def _apart_from(stores: tuple[torch.Tensor, torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """Return a copy of rows that lie in the memory that is written."""
    address = rows.data_ptr()
    for store in stores:
        start = store.data_ptr()
        if start <= address < start + store.nbytes:
            return rows.clone()
    return rows


_append_in_graph = torch.library.custom_op("kvcache::append", _append, mutates_args=("k_blocks", "v_blocks"))


@_append_in_graph.register_fake
def _(*_: Any) -> None:
    pass
