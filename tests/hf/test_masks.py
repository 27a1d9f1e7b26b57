"""Masks as rules: what is recognised, what it says, and that its content is transformers' mask."""

import pytest
import torch
from transformers import AttentionMaskInterface
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask, sdpa_mask

from kvcache.hf import cache_for, use_attention
from kvcache.hf.attention import NAME
from kvcache.hf.deferred import Deferred, content_of, source_of
from kvcache.hf.masks import MaskRule, mask_of_rule
from kvcache.hf.versions import CACHE_ARGUMENT
from tests.hf.runs import ids_of, left_padded
from tests.hf.tiny_models import WINDOW, gemma3


@pytest.fixture(scope="module")
def model():
    model = gemma3()
    use_attention(model)
    return model


def masks(model, new, mask=None, batch=3, make=create_causal_mask, cache=None, **options):
    """Return our mask for new tokens behind the cache, and transformers' own."""
    arguments = {"inputs_embeds": torch.zeros(batch, new, 4), "attention_mask": mask, CACHE_ARGUMENT: cache, **options}
    ours = make(config=model.config, **arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(AttentionMaskInterface._global_mapping, NAME, sdpa_mask)
        return ours, make(config=model.config, **arguments)


def filled(model, count, batch=3):
    cache = cache_for(model)
    with torch.no_grad():
        model(ids_of(count, batch), cache=cache)
    return cache


@pytest.mark.parametrize("make", [create_causal_mask, create_sliding_window_causal_mask])
@pytest.mark.parametrize(("past", "new"), [(0, 4), (0, 12), (9, 1), (9, 3), (3, 1), (2, 9)])
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
def test_the_content_is_transformers_mask(model, make, past, new, padded):
    cache = filled(model, past) if past else cache_for(model)
    mask = left_padded((past + new, past + new - 2, 1))[1] if padded else None
    ours, theirs = masks(model, new, mask, make=make, cache=cache)
    assert (ours is None) == (theirs is None)
    if ours is None:
        return
    window = WINDOW if make is create_sliding_window_causal_mask else None
    rule = source_of(ours, MaskRule)
    assert rule.window == window
    assert ours.shape == theirs.shape
    assert torch.equal(content_of(ours), theirs)
    if padded:
        assert rule.starts.tolist() == [0, 2, past + new - 1]
        assert rule.largest_start == past + new - 1
    else:
        assert rule.starts is None


@pytest.mark.parametrize(
    "options",
    [
        {"and_mask_function": lambda b, h, q, k: (q - k) % 2 == 0},
        {"or_mask_function": lambda b, h, q, k: k < 2},
        {"block_sequence_ids": torch.tensor([[-1, 0, 0, 0, -1, -1]] * 3)},
        {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]] * 3)},
    ],
    ids=["and", "or", "blocks", "packed"],
)
@pytest.mark.parametrize("make", [create_causal_mask, create_sliding_window_causal_mask])
def test_other_rules_are_transformers_own_masks(model, options, make):
    # Packed texts are recognised where there is no cache.
    cache = None if "position_ids" in options else cache_for(model)
    ours, theirs = masks(model, 6, make=make, cache=cache, **options)
    assert type(ours) is torch.Tensor
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("row", [[1, 1, 0, 1], [1, 1, 1, 0], [0, 1, 0, 0]], ids=str)
def test_zeros_elsewhere_than_before_the_ones_are_no_left_padding(model, row):
    ours, theirs = masks(model, 4, torch.tensor([row, [1] * 4]), batch=2, cache=cache_for(model))
    assert not isinstance(ours, Deferred)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("shape", [(3, 6), (3, 1), (3, 9)], ids=str)
def test_a_mask_of_ones_that_does_not_cover_all_keys_is_no_rule(shape):
    """transformers hides what it does not cover."""
    mask = torch.ones(shape, dtype=torch.bool)
    options = {"q_offset": 5, "attention_mask": mask, "allow_is_causal_skip": False}
    ours = mask_of_rule(3, 2, 7, **options)
    assert not isinstance(ours, Deferred)
    assert torch.equal(ours, sdpa_mask(3, 2, 7, **options))


def test_a_preallocated_cache_of_transformers_keeps_its_mask():
    """There the newest query is not at the last key."""
    ours = mask_of_rule(1, 2, 16, q_offset=5)
    assert type(ours) is torch.Tensor
    assert torch.equal(ours, sdpa_mask(1, 2, 16, q_offset=5))


def test_a_mask_that_is_touched_is_what_it_holds():
    deferred = mask_of_rule(1, 3, 5, q_offset=2)
    assert source_of(deferred, MaskRule) is not None
    assert torch.equal(deferred[:, :, -1:], torch.ones(1, 1, 1, 5, dtype=torch.bool))
    assert deferred.touched
    assert source_of(deferred, MaskRule) is None  # it may have been written
    assert "MaskRule(window=None" in repr(deferred)
