"""Plain attention through `torch.nn.functional.scaled_dot_product_attention`, where that gives the same result."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvcache.attention.arguments import AttentionArguments
from kvcache.attention.visibility import visible_slots


def sdpa_applies(arguments: AttentionArguments) -> bool:
    """Whether every row of the batch sees the same contiguous run of slots and SDPA knows all options."""
    q, k, v = arguments.q, arguments.k, arguments.v
    same_for_all_rows = arguments.block_table is None and arguments.lengths is None and arguments.starts is None
    contiguous_run = arguments.window is None or arguments.sinks == 0 or arguments.window >= k.shape[2]
    plain_scores = arguments.softcap is None and arguments.sink_logits is None and not arguments.return_lse
    # With Dv != D SDPA leaves its fused kernels, and 16-bit inputs are then accumulated in 16 bits.
    fused = q.dtype == k.dtype == v.dtype and k.shape[-1] == v.shape[-1]
    every_query_sees_something = 0 < q.shape[2] <= k.shape[2] and q.numel() > 0
    return same_for_all_rows and contiguous_run and plain_scores and fused and every_query_sees_something


def sdpa_attention(arguments: AttentionArguments) -> torch.Tensor:
    """Return the output (B, H, T, D) for arguments that `sdpa_applies` to."""
    q, k, v, window = arguments.q, arguments.k, arguments.v, arguments.window
    batch, heads, num_queries, head_dim = q.shape
    if window is not None:  # slots before the first query's window are seen by nobody
        first = max(0, k.shape[2] - num_queries - window + 1)
        k, v = k[:, :, first:], v[:, :, first:]
    kv_heads, num_slots = k.shape[1], k.shape[2]
    q, k, v = _with_safe_strides(q), _with_safe_strides(k), _with_safe_strides(v)
    scale = arguments.scale
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
