"""The native CPU kernel's side in Python: when it serves a call, and the call itself.

The kernel reads keys and values once, straight from where they are stored, for a few queries at a time. It takes
pointers, so an eager call goes to it directly; under `torch.compile` the same call is one operation of the graph.
"""

from typing import Any

import torch
from torch.compiler import is_compiling

from kvcache import native
from kvcache.attention.arguments import AttentionArguments
from kvcache.attention.encoded import Store, decoded_dtype, stored_data
from kvcache.attention.processor import has_amx
from kvcache.errors import InvalidValueError

BEST = -1  # of native.kernels.INSTRUCTION_SETS
MOST_QUERIES = 4096  # of a sequence, that the kernel takes at once
SMALLEST_SOFTCAP = 1e-30  # scores divided by less would leave float32's range


def kernel_attention(arguments: AttentionArguments) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Return what the kernel computes, or None for arguments that it does not serve, or PyTorch serves faster.

    Returns:
        The output (B, H, T, Dv) in q's dtype and, where it is asked for, the log-sum-exp (B, H, T) in float32.

    Raises:
        InvalidValueError: `lengths`, `starts`, or an entry of the block table that is needed, is out of range.
    """
    q, k, v, block_table, lengths, starts, window, sinks, scale, softcap, sink_logits, return_lse, _ = arguments
    k_format, v_format = _format(k), _format(v)
    v_head_dim = v.shape[3] if isinstance(v, torch.Tensor) else v.head_dim
    if (
        k_format is None
        or v_format is None
        or q.dtype not in native.FORMATS
        or not q.is_cpu
        or (softcap is None and _sdpa_is_faster(q.shape[2], k))
        or (softcap is not None and softcap < SMALLEST_SOFTCAP)
        or q.shape[3] > native.MAX_HEAD_DIM
        or not 0 < v_head_dim <= native.MAX_HEAD_DIM
        or q.numel() == 0
        or arguments.needs_gradient
    ):
        return None
    k_data, v_data = stored_data(k), stored_data(v)
    in_graph = is_compiling()
    if not in_graph and not native.have_memory(q, k_data, v_data):
        return None
    if native.kernels is None:
        if not in_graph:
            native.warn_that_kernels_are_missing()
        return None
    call = _attend_in_graph if in_graph else _attend
    output, lse = call(
        q,
        k_data,
        v_data,
        k_format,
        v_format,
        v_head_dim,
        block_table,
        lengths,
        starts,
        window,
        sinks,
        scale,
        softcap,
        sink_logits,
        return_lse,
    )
    return output, lse if return_lse else None


def _sdpa_is_faster(num_queries: int, k: Store) -> bool:
    """Whether PyTorch computes so many queries in less time, or less memory: the kernel keeps all of its results."""
    if num_queries <= native.FEW_QUERIES:
        return False
    return num_queries > MOST_QUERIES or (decoded_dtype(k) == torch.bfloat16 and has_amx())


def _format(store: Store) -> int | None:
    return native.FORMATS.get(store.dtype if isinstance(store, torch.Tensor) else store.codec_name)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_format: int,
    v_format: int,
    v_head_dim: int,
    block_table: torch.Tensor | None,
    lengths: torch.Tensor | None,
    starts: torch.Tensor | None,
    window: int | None,
    sinks: int,
    scale: float,
    softcap: float | None,
    sink_logits: torch.Tensor | None,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    assert native.kernels is not None
    q_strides, k_strides, v_strides = q.stride(), k.stride(), v.stride()
    if q_strides[3] != 1 or k_strides[3] != 1 or v_strides[3] != 1:
        q, k, v = (rows if rows.stride(3) == 1 else rows.contiguous() for rows in (q, k, v))
        q_strides, k_strides, v_strides = q.stride(), k.stride(), v.stride()
    batch, heads, queries, _ = q.shape
    output = q.new_empty(batch, heads, queries, v_head_dim)
    lse = q.new_empty(batch, heads, queries, dtype=torch.float32) if return_lse else None
    num_slots, table_stride = k.shape[2], 0
    if block_table is not None:
        block_table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
        num_slots, table_stride = block_table.shape[1] * num_slots, block_table.stride(0)
    if lengths is not None:
        lengths = lengths.contiguous()
    if starts is not None:
        starts = starts.contiguous()
    if sink_logits is not None:
        sink_logits = sink_logits.detach().to(torch.float32).contiguous()
    try:
        native.kernels.attend(
            BEST,
            q.data_ptr(),
            native.FORMATS[q.dtype],
            q.shape,
            q_strides,
            k.data_ptr(),
            k_format,
            k.shape,
            k_strides,
            v.data_ptr(),
            v_format,
            v.shape,
            v_strides,
            v_head_dim,
            0 if block_table is None else block_table.data_ptr(),
            table_stride,
            num_slots,
            0 if lengths is None else lengths.data_ptr(),
            0 if starts is None else starts.data_ptr(),
            window or 0,
            sinks,
            scale,
            softcap or 0.0,
            0 if sink_logits is None else sink_logits.data_ptr(),
            output.data_ptr(),
            0 if lse is None else lse.data_ptr(),
            torch.get_num_threads(),
        )
    except IndexError as error:
        raise InvalidValueError(str(error)) from None
    return output, lse


@torch.library.custom_op("kvcache::attend", mutates_args=())
def _attend_in_graph(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_format: int,
    v_format: int,
    v_head_dim: int,
    block_table: torch.Tensor | None,
    lengths: torch.Tensor | None,
    starts: torch.Tensor | None,
    window: int | None,
    sinks: int,
    scale: float,
    softcap: float | None,
    sink_logits: torch.Tensor | None,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as one operation of a graph, which always returns two tensors."""
    output, lse = _attend(
        *(q, k, v, k_format, v_format, v_head_dim, block_table, lengths, starts),
        *(window, sinks, scale, softcap, sink_logits, return_lse),
    )
    return output, output.new_empty(0, dtype=torch.float32) if lse is None else lse


@_attend_in_graph.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_format: int, v_format: int, v_head_dim: int, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return_lse = rest[-1]
    return q.new_empty(*q.shape[:3], v_head_dim), q.new_empty(q.shape[:3] if return_lse else 0, dtype=torch.float32)
