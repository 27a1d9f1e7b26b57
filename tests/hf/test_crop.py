"""Going back, starting again, and moving the rows of the batch."""

import gc
import weakref

import pytest
import torch
from transformers.generation.utils import DeferredStopCheck

from kvcache import InvalidValueError, RollbackError
from kvcache.hf import cache_for
from tests.hf.tagged import fill, lengths, positions_of, tagged
from tests.hf.tiny_models import WINDOW, bart, gemma3

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("removed", "left"), [(-1, 3), (-4, 0), (-6, 0), (0, 4)])
@pytest.mark.parametrize("record", [False, True], ids=["", "recording"])
def test_d3_crop_counts_from_the_end(hybrid, removed, left, record):
    """D3: on 4 tokens, -1, -4, -6 and 0 leave 3, 0, 0 and 4 in every layer, and what comes next is right."""
    cache = cache_for(hybrid)
    if record:
        cache.activate_past_recording()
    fill(cache, 4)
    cache.crop(removed)
    assert lengths(cache) == [left] * 3
    for k, _ in fill(cache, 2):
        assert positions_of(k) == list(range(left + 2))


@pytest.mark.parametrize("removed", [2, 9])
def test_d3_positive_counts_are_refused(hybrid, removed):
    """D3: transformers' crop takes no absolute length."""
    cache = cache_for(hybrid)
    fill(cache, 4)
    with pytest.raises(ValueError, match=f"tokens_to_remove is {removed}; expected 0 or less"):
        cache.crop(removed)
    assert lengths(cache) == [4] * 3


def test_crop_on_an_empty_cache_does_nothing(hybrid):
    cache = cache_for(hybrid)
    for removed in (0, -3):
        cache.crop(removed)
    assert lengths(cache) == [0] * 3


def test_a_wrapped_window_that_cannot_go_back_changes_no_layer():
    model = gemma3(window=WINDOW, layer_types=["full_attention", "full_attention", "sliding_attention"])
    cache = cache_for(model)
    fill(cache, 12)
    message = r"layer 2 has seen 12 tokens .* without the last 3; call activate_past_recording\(\) before"
    with pytest.raises(RollbackError, match=message):
        cache.crop(-3)
    assert lengths(cache) == [12] * 3
    assert [positions_of(k)[0] for k, _ in fill(cache, 1)] == [0, 0, 8]


def test_recording_keeps_everything_since_the_last_crop(hybrid):
    cache = cache_for(hybrid)
    fill(cache, 9)
    cache.activate_past_recording()
    for rounds, dropped in enumerate((0, 20, 7, 1)):
        for _ in range(4):
            fill(cache, 5)
            cache.activate_past_recording()  # it records already
        assert lengths(cache) == [9 + 20 * (rounds + 1) - sum((0, 20, 7, 1)[:rounds])] * 3
        cache.crop(-dropped)
        n = cache.get_seq_length()
        assert [positions_of(layer.keys)[-WINDOW + 1 :] for layer in cache.layers] == [[n - 4, n - 3, n - 2, n - 1]] * 3
    with pytest.raises(RollbackError):
        cache.crop(-2)


def test_recording_memory_grows_in_doublings_and_is_given_back_at_the_crop(hybrid):
    cache = cache_for(hybrid)
    cache.activate_past_recording()
    fill(cache, 400)
    window = cache.layers[0]
    assert window.rows.k_cache.shape[2] == 400
    cache.crop(-3)
    assert window.rows.k_cache.shape[2] == WINDOW
    assert lengths(cache) == [397] * 3
    slacks = set()
    for _ in range(100):
        fill(cache, 1)
        slacks.add(window.rows.slack)
    assert slacks == {0, 1, 2, 4, 8, 16, 32, 64, 128}
    cache.crop(-100)
    assert lengths(cache) == [397] * 3
    for _ in range(20):  # rounds of four drafts: the slack that they need stays
        fill(cache, 5)
        cache.crop(-2)
    assert window.rows.slack == 4


def test_the_end_of_deferred_stopping_switches_recording_off(hybrid):
    cache = cache_for(hybrid)
    fill(cache, 9)
    check = DeferredStopCheck(torch.ones(2, 9, dtype=torch.int64), 50, cache, cache_is_returned=True)
    check.slots.clear()  # its events are those of a device
    fill(cache, 3)
    check.stop_reported = True
    assert check.finish() == 1
    assert lengths(cache) == [11] * 3
    assert not any(cache.is_recording_past(index) for index in range(3))
    before = cache.layers[0].rows.nbytes
    fill(cache, 300)
    assert cache.layers[0].rows.nbytes == before


def test_c6_reset_equals_a_new_cache(hybrid):
    """C6: run A, reset, run B; length 0 in every layer, nothing of A left, and another batch size is fine."""
    cache = cache_for(hybrid)
    cache.activate_past_recording()
    fill(cache, 12)
    old = weakref.ref(cache.layers[2].rows.k_cache)
    cache.reset()
    gc.collect()
    assert lengths(cache) == [0] * 3
    assert old() is None
    assert not cache.is_recording_past(0)
    new = cache_for(hybrid)
    for mine, other in zip(fill(cache, 9, batch=3), fill(new, 9, batch=3), strict=True):
        assert torch.equal(mine[0], other[0])
        assert torch.equal(mine[1], other[1])


def test_c6_reset_when_some_layers_were_never_written(hybrid):
    """C6: an interrupted forward leaves layers unequal; reset makes them all empty."""
    cache = cache_for(hybrid)
    cache.update(*tagged(0, 4), 0)
    assert lengths(cache) == [4, 0, 0]
    cache.reset()
    assert lengths(cache) == [0] * 3
    fill(cache, 2)
    assert lengths(cache) == [2] * 3


@pytest.mark.parametrize("max_tokens", [None, 20], ids=["growing", "preallocated"])
@pytest.mark.parametrize("stored", [3, 12])
def test_d1_keys_stay_keys_and_values_stay_values(hybrid, max_tokens, stored):
    """D1: K = 1 and V = 2 through repeat, select and reorder stay 1 and 2."""
    cache = cache_for(hybrid, max_tokens)
    ones = torch.ones(2, 2, stored, 4)
    for index in range(3):
        cache.update(ones, 2 * ones, index)
    cache.batch_repeat_interleave(3)
    cache.reorder_cache(torch.tensor([5, 0, 1, 1, 2, 4]))
    cache.batch_select_indices(torch.tensor([0, 3, 5]))
    assert cache.batch_size == 3
    for layer in cache.layers:
        assert torch.equal(layer.keys, torch.ones_like(layer.keys))
        assert torch.equal(layer.values, torch.full_like(layer.values, 2))


def test_rows_of_the_batch_follow_their_index(hybrid):
    cache = cache_for(hybrid)
    cache.reorder_cache(torch.tensor([0, 1]))  # nothing to do yet
    fill(cache, 12, batch=2)
    cache.batch_repeat_interleave(2)
    assert [layer.keys[:, 0, 0, 0].tolist() for layer in cache.layers][2] == [0, 0, 1000, 1000]
    cache.reorder_cache(torch.tensor([3, 1, 2, 0]))
    assert cache.layers[0].keys[:, 0, -1, 0].tolist() == [1011, 11, 1011, 11]
    cache.batch_select_indices(torch.tensor([1, 0]))
    assert cache.layers[0].keys[:, 0, -1, 0].tolist() == [11, 1011]
    assert cache.layers[2].keys[:, 0, 0, 0].tolist() == [0, 1000]
    with pytest.raises(InvalidValueError, match=r"index holds 2; expected every entry in \[0, 1\]"):
        cache.reorder_cache(torch.tensor([0, 2]))
    assert cache.layers[0].keys[:, 0, -1, 0].tolist() == [11, 1011]


def test_d8_rows_of_an_encoder_decoder_cache_follow_the_beams():
    """D8: 2 samples as rows [0, 0, 1], reordered to [0, 1, 1]: own and cross rows go with the index."""
    cache = cache_for(bart())
    for part, count in ((cache.self_attention_cache, 3), (cache.cross_attention_cache, 5)):
        fill(part, count, batch=2)
        part.batch_select_indices(torch.tensor([0, 0, 1]))
    cache.reorder_cache(torch.tensor([0, 2, 2]))
    for part in (cache.self_attention_cache, cache.cross_attention_cache):
        for layer in part.layers:
            assert layer.keys[:, 0, 0, 0].tolist() == [0, 1000, 1000]
    assert (cache.batch_size, cache.get_seq_length(), cache.is_croppable) == (3, 3, True)
    assert cache.nbytes == cache.self_attention_cache.nbytes + cache.cross_attention_cache.nbytes
    cache.crop(-2)
    assert lengths(cache.self_attention_cache) == [1] * 3
    assert lengths(cache.cross_attention_cache) == [5] * 3
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 5]))
    cache.reset()
    assert lengths(cache.cross_attention_cache) == [0] * 3
    assert not any(cache.is_updated.values())
