"""Plain attention through `torch.nn.functional.scaled_dot_product_attention`, where that gives the same result."""

from functools import reduce

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvcache.attention.arguments import AttentionArguments
from kvcache.attention.encoded import decode_data, decoded_dtype, stored_data
from kvcache.attention.visibility import visible_slots


def sdpa_applies(arguments: AttentionArguments) -> bool:
    """Whether each sequence sees one contiguous run of slots and SDPA knows all options."""
    k, v = arguments.k, arguments.v
    contiguous_run = arguments.window is None or arguments.sinks == 0 or arguments.window >= k.shape[2]
    plain_scores = arguments.softcap is None and arguments.sink_logits is None and not arguments.return_lse
    # With Dv != D SDPA leaves its fused kernels, and 16-bit inputs are then accumulated in 16 bits.
    fused = k.shape[-1] == v.shape[-1]
    return arguments.block_table is None and contiguous_run and plain_scores and fused


def sdpa_attention(arguments: AttentionArguments) -> torch.Tensor:
    """Return the output (B, H, T, D) for arguments that `sdpa_applies` to."""
    stores = arguments.q, arguments.k, arguments.v
    dtype = reduce(torch.promote_types, map(decoded_dtype, stores))
    q, k, v = (_with_safe_strides(decode_data(store, stored_data(store), dtype)) for store in stores)
    if arguments.lengths is None and arguments.starts is None:
        output = _last_queries(q, k, v, arguments.window, arguments.scale)
    else:
        # Slicing each row to what it may see needs no mask, copies nothing, and reads no slot that must not be read.
        batch, _, num_slots, _ = k.shape
        lengths = [num_slots] * batch if arguments.lengths is None else arguments.lengths.tolist()
        starts = [0] * batch if arguments.starts is None else arguments.starts.tolist()
        rows = [
            _last_queries(
                q[row : row + 1],
                k[row : row + 1, :, start:length],
                v[row : row + 1, :, start:length],
                arguments.window,
                arguments.scale,
            )
            for row, (start, length) in enumerate(zip(starts, lengths, strict=True))
        ]
        output = torch.cat(rows) if rows else torch.zeros_like(q)
    return output.to(arguments.q.dtype)


def _last_queries(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, scale: float) -> torch.Tensor:
    """Attend the last T of the S tokens in `k`, all of which may be seen; the first of T > S queries see nothing."""
    num_queries, num_slots = q.shape[2], k.shape[2]
    if num_queries > num_slots:
        blind = num_queries - num_slots
        seeing = _last_queries(q[:, :, blind:], k, v, window, scale)
        return torch.cat([torch.zeros_like(q[:, :, :blind]), seeing], dim=2)
    if q.numel() == 0:
        return torch.zeros_like(q)
    if window is not None:  # slots before the first query's window are seen by nobody
        first = max(0, num_slots - num_queries - window + 1)
        k, v, num_slots = k[:, :, first:], v[:, :, first:], num_slots - first
    batch, heads, _, head_dim = q.shape
    kv_heads = k.shape[1]
    if num_queries == 1:
        # One query a head sees everything, so a group's query heads can be the rows of one unmasked problem:
        # twice as fast as `enable_gqa` on a CPU, which reads each key/value head once for every query head.
        grouped = q.reshape(batch, kv_heads, heads // kv_heads, head_dim)
        return scaled_dot_product_attention(grouped, k, v, scale=scale).reshape(q.shape)
    # SDPA's causal flag is aligned top-left, so it is right only where there is no past.
    is_causal = num_queries == num_slots and (window is None or window >= num_slots)
    mask = None if is_causal else visible_slots(num_queries, num_slots, window=window, device=q.device)
    return scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=heads != kv_heads
    )


def _with_safe_strides(tensor: torch.Tensor) -> torch.Tensor:
    """Copy tensors with a layout that sends SDPA to a kernel that accumulates 16-bit inputs in 16 bits."""
    expanded = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.contiguous() if expanded or tensor.stride(-1) != 1 else tensor
