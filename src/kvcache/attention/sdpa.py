"""Attention through PyTorch's SDPA: on a CPU in parts, elsewhere through the public function."""

from functools import reduce

import torch
from torch.autograd import forward_ad
from torch.nn.functional import scaled_dot_product_attention

from kvcache.attention.arguments import AttentionArguments
from kvcache.attention.encoded import decode_data, decoded_dtype, stored_data
from kvcache.attention.parts import attention_by_parts, has_flash
from kvcache.attention.processor import has_amx
from kvcache.attention.visibility import visible_slots

MEMORY_BOUND_QUERIES = 8  # up to so many, reading the keys and values takes longer than the arithmetic


def sdpa_applies(arguments: AttentionArguments) -> bool:
    """Whether `sdpa_attention` serves these arguments; `reference_attention` serves all."""
    if forward_ad._current_level >= 0:  # SDPA's kernels on a CPU have no rule for tangents
        return False
    if _by_parts(arguments):
        return arguments.softcap is None
    k, v = arguments.k, arguments.v
    contiguous_run = arguments.window is None or arguments.sinks == 0 or arguments.window >= k.shape[2]
    plain_scores = arguments.softcap is None and arguments.sink_logits is None and not arguments.return_lse
    # With Dv != D SDPA leaves its fused kernels, and 16-bit inputs are then accumulated in 16 bits.
    fused = k.shape[-1] == v.shape[-1]
    return arguments.block_table is None and contiguous_run and plain_scores and fused


def sdpa_attention(arguments: AttentionArguments) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the output (B, H, T, Dv) in q's dtype, for arguments that `sdpa_applies` to.

    With it, where it is asked for, the log-sum-exp (B, H, T) in the compute dtype; else None.

    Raises:
        InvalidValueError: an entry of the block table that is needed is not a block of the store.
    """
    arguments = _with_positive_scale(arguments)
    if not _by_parts(arguments):
        return _public_attention(arguments), None
    dtype = _arithmetic_dtype(_common_dtype(arguments), arguments.q.shape[2])
    output, lse = attention_by_parts(arguments, dtype)
    return output.to(arguments.q.dtype), lse.to(arguments.compute_dtype) if arguments.return_lse else None


def _with_positive_scale(arguments: AttentionArguments) -> AttentionArguments:
    """Move the scale's sign into q: with a causal mask SDPA scales its -inf, which gives NaN for 0, inf below 0."""
    scale = arguments.scale
    smallest = torch.finfo(torch.float32).tiny  # below it SDPA's scale is 0, and all scores are 0
    if scale >= smallest:
        return arguments
    sign, scale = (-1, -scale) if scale <= -smallest else (0, 1.0)
    return arguments._replace(q=arguments.q * sign, scale=scale)


def _by_parts(arguments: AttentionArguments) -> bool:
    """Whether the CPU kernel can be used that also gives the log-sum-exp, which has no gradient."""
    return arguments.q.device.type == "cpu" and not arguments.needs_gradient and has_flash()


def _common_dtype(arguments: AttentionArguments) -> torch.dtype:
    return reduce(torch.promote_types, map(decoded_dtype, (arguments.q, arguments.k, arguments.v)))


def _arithmetic_dtype(dtype: torch.dtype, num_queries: int) -> torch.dtype:
    """Return the dtype that the kernel is given inputs of `dtype` in; it sums in float32 at least in any case.

    A few queries read keys and values as they are, since converting them takes longer than all else: one query over
    4096 tokens (32 heads over 8, D = 128) takes 0.8 ms in 16 bits and 2.5 to 9 ms with converting. Many queries are
    3.5 times faster in bfloat16 where the CPU multiplies matrices of it (AMX); elsewhere float32 is as fast (AVX-512,
    float16 included) or 4 times faster (an EPYC with AVX2).
    """
    if dtype not in (torch.float16, torch.bfloat16) or num_queries <= MEMORY_BOUND_QUERIES:
        return dtype
    return dtype if dtype == torch.bfloat16 and has_amx() else torch.float32


def _public_attention(arguments: AttentionArguments) -> torch.Tensor:
    """Return the output (B, H, T, D) through the function that knows all devices and gradients."""
    dtype = _common_dtype(arguments)
    stores = arguments.q, arguments.k, arguments.v
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
