"""Masks as the rules that they come from: causal or a window, and left padding.

transformers asks a mask function for the mask of each kind of layers before a forward. Where the mask is one of these
rules it is returned as a deferred tensor, which attention need not look into; any other mask is transformers' own.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.compiler import is_compiling
from transformers.masking_utils import causal_mask_function, sdpa_mask, sliding_window_causal_mask_function

from kvcache.hf.deferred import Deferred


class MaskRule(NamedTuple):
    """Each query sees the keys up to its own, the last `window` of them, from its row's first real token on."""

    window: int | None
    starts: torch.Tensor | None  # (B,) positions of the first real tokens, None where there is no padding
    largest_start: int
    first_position: int  # of the keys that the mask covers
    num_keys: int

    @property
    def hides_keys(self) -> bool:
        """Whether the padding hides any of the keys."""
        return self.starts is not None and self.largest_start > self.first_position

    @property
    def starts_in_keys(self) -> torch.Tensor | None:
        """`starts` counted from the first key."""
        if self.starts is None or not self.hides_keys:
            return None
        return (self.starts - self.first_position).clamp(min=0)


def mask_of_rule(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,  # (B, S), 0 where there is padding
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **options: Any,
) -> torch.Tensor | None:
    """Return the mask (B, 1, T, S) that `sdpa_mask` returns for these arguments, deferred if it is one of the rules.

    None says that a single query, or as many as there are keys, are under no other rule than causality.
    """
    computed: Callable[[], Any] = partial(
        sdpa_mask,
        batch_size,
        q_length,
        kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,  # None would say "aligned at the first key"
        use_vmap=use_vmap,
        device=device,
        **options,
    )
    length = kv_offset + kv_length
    plain = causal_mask_function if local_size is None else sliding_window_causal_mask_function(local_size)
    # In a preallocated cache of transformers the newest query is not at the last key.
    at_the_end = not isinstance(q_offset, torch.Tensor) and q_offset + q_length == length
    covers_all = attention_mask is None or attention_mask.shape == (batch_size, length)
    is_rule = at_the_end and covers_all and not is_compiling() and _same(mask_function, plain)
    starts = None
    if is_rule and attention_mask is not None and not attention_mask.all():
        starts = _left_padding(attention_mask)
        is_rule = starts is not None
    if not is_rule:
        mask: torch.Tensor = computed()
        return mask
    if (
        starts is None
        and allow_is_causal_skip
        and q_length in (1, kv_length)
        and (local_size is None or kv_length < local_size)
    ):
        return None
    largest_start = 0 if starts is None else int(starts.max())
    rule = MaskRule(local_size, starts, largest_start, kv_offset, kv_length)
    shape = batch_size, 1, q_length, kv_length
    return Deferred.of(shape, torch.bool, torch.device(device), rule, computed)


def _left_padding(mask: torch.Tensor) -> torch.Tensor | None:
    """Return where each row of a mask (B, S) begins, None if zeros stand elsewhere than before the ones."""
    length = mask.shape[1]
    num_real = mask.sum(dim=1)
    starts = mask.to(torch.uint8).argmax(dim=1).masked_fill(num_real == 0, length)
    return starts if torch.equal(num_real, length - starts) else None


def _same(one: Any, other: Any) -> bool:
    """Whether two functions are one, or were made by the same code from the same values."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if not (callable(one) and callable(other)):
        return not isinstance(one, torch.Tensor) and not isinstance(other, torch.Tensor) and bool(one == other)
    if one is other:
        return True
    if getattr(one, "__code__", None) is None or one.__code__ is not getattr(other, "__code__", None):
        return False
    cells, other_cells = (tuple(cell.cell_contents for cell in function.__closure__ or ()) for function in (one, other))
    return _same(cells, other_cells)
