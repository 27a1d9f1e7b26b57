"""Attention of transformers' decoders through `kvcache.attend`, where a decode step needs nothing else."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvcache.attention import attend

NAME = "kvcache"
# What attention functions are handed that does not change what one query over all keys computes, whatever its value.
HARMLESS = {"cache_position", "is_causal", "logits_to_keep", "position_ids", "sliding_window", "use_cache"}


@contextmanager
def fused_decode(model: Any) -> Iterator[None]:
    """Within it the model's decode steps read the cache through `attend`, everything else goes where it went before.

    That is so for models on a CPU whose attention is transformers' "sdpa"; others stay as they are, and so do models of
    several parts, each of which may have an attention of its own.
    """
    before = model.config._attn_implementation
    if before != "sdpa" or model.config.sub_configs or model.device.type != "cpu":
        yield
        return
    # transformers finds both by this name; without a mask function of that name it would pass no masks at all.
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,  # (B, H, T, D)
    key: torch.Tensor,  # (B, Hkv, S, D)
    value: torch.Tensor,  # (B, Hkv, S, Dv)
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return the output (B, T, H, Dv), as transformers' attention functions do."""
    asked = {name for name, value in kwargs.items() if value is not None and value is not False}
    if query.shape[2] == 1 and attention_mask is None and dropout == 0 and asked <= HARMLESS:
        return attend(query, key, value, scale=scaling).transpose(1, 2), None
    output, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )
    return output, None
