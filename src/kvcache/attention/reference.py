"""Attention in plain PyTorch: every option, any floating dtype, written to be read.

This is what every faster kernel is held against. Scores and sums are float32 (float64 for float64 inputs);
key/value heads are never repeated, the query heads of a group are rows of one matrix product instead.
"""

import torch

from kvcache.attention.arguments import AttentionArguments
from kvcache.attention.encoded import Store, decode_data, stored_data
from kvcache.attention.gather import check_entries
from kvcache.attention.visibility import visible_slots


def reference_attention(arguments: AttentionArguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output (B, H, T, Dv) in q's dtype and the log-sum-exp (B, H, T) in the compute dtype."""
    q = arguments.q
    batch, heads, num_queries, head_dim = q.shape
    dtype = arguments.compute_dtype
    visible = visible_slots(
        num_queries,
        arguments.num_slots,
        lengths=arguments.lengths,
        starts=arguments.starts,
        window=arguments.window,
        sinks=arguments.sinks,
        device=q.device,
    ).expand(batch, -1, -1)  # (B, T, S)
    seen = visible.any(dim=1)  # (B, S): slots that at least one query sees
    k = _rows(arguments.k, arguments.block_table, seen, dtype)  # (B, Hkv, S, D)
    v = _rows(arguments.v, arguments.block_table, seen, dtype)  # (B, Hkv, S, Dv)

    kv_heads = k.shape[1]
    group = heads // kv_heads  # query head h reads key/value head h // group
    rows = (batch, kv_heads, group * num_queries)
    scores = (q.to(dtype) * arguments.scale).reshape(*rows, head_dim) @ k.transpose(-1, -2)
    scores = scores.view(batch, kv_heads, group, num_queries, k.shape[2])
    if arguments.softcap is not None:
        scores = arguments.softcap * torch.tanh(scores / arguments.softcap)
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    if arguments.sink_logits is not None:
        logits = arguments.sink_logits.to(dtype).view(1, kv_heads, group, 1, 1)
        scores = torch.cat([scores, logits.expand(batch, -1, -1, num_queries, -1)], dim=-1)

    lse = torch.logsumexp(scores, dim=-1)  # (B, Hkv, G, T); -inf for a query that sees nothing
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
    weights = weights[..., : v.shape[2]]  # a sink logit has no value
    output = weights.flatten(2, 3) @ v
    return output.reshape(batch, heads, num_queries, v.shape[3]).to(q.dtype), lse.reshape(batch, heads, num_queries)


def _rows(store: Store, block_table: torch.Tensor | None, seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the rows (B, Hkv, S, D) of each sequence, zero where no query sees them (0 * NaN is NaN)."""
    data = stored_data(store)
    if block_table is not None:
        num_blocks, _, block_size, _ = data.shape
        needed = seen.view(*block_table.shape, block_size).any(dim=-1)  # (B, M)
        check_entries(block_table[needed], num_blocks)
        if num_blocks == 0:  # then none is needed
            data = data.new_zeros(1, *data.shape[1:])
        blocks = data[block_table.where(needed, 0)]  # (B, M, Hkv, block_size, anything)
        data = blocks.transpose(1, 2).flatten(2, 3)
    return decode_data(store, data, dtype).masked_fill(~seen[:, None, :, None], 0.0)
