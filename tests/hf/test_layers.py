"""What transformers asks of the layers before and after an update: lengths, mask sizes, room."""

import copy
import pickle

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

from kvcache import CacheFullError, InvalidValueError, KVCacheError, RollbackError
from kvcache.hf import cache_for
from tests.allocations import CountAllocations
from tests.hf.tagged import fill, lengths, positions_of, tagged
from tests.hf.tiny_models import WINDOW, llama, t5

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("record", [False, True], ids=["", "recording"])
@pytest.mark.parametrize("query", [1, 2, 3, 4, 5])
def test_e10_update_returns_what_the_mask_sizes_promise(hybrid, record, query):
    """E10: in every state, recording or not, after a crop or not, as many rows as announced, from the offset on."""
    for stored in range(13):
        for dropped in range(min(stored, 3) + 1):
            cache = cache_for(hybrid)
            if record:
                cache.activate_past_recording()
            fill(cache, stored)
            if record or stored <= WINDOW:
                cache.crop(-dropped)
            n = cache.get_seq_length()
            promised = [cache.get_mask_sizes(query, index) for index in range(3)]
            returned = fill(cache, query)
            for (length, offset), (k, v) in zip(promised, returned, strict=True):
                assert positions_of(k) == list(range(offset, offset + length))
                assert positions_of(-v) == positions_of(k)
            assert promised[0] == (min(n, WINDOW - 1) + query, max(n - WINDOW + 1, 0))
            assert promised[2] == (n + query, 0)


OPERATIONS = st.one_of(
    st.tuples(st.just("update"), st.integers(1, 9)),
    st.tuples(st.just("crop"), st.integers(0, 12)),
    st.tuples(st.just("reorder"), st.lists(st.integers(0, 3), min_size=4, max_size=4)),
    st.tuples(st.just("repeat"), st.integers(1, 2)),
    st.tuples(st.just("select"), st.lists(st.integers(0, 3), min_size=1, max_size=3)),
    st.sampled_from([("reset", None), ("record", None), ("stop", None), ("copy", None), ("pickle", None)]),
)


@pytest.mark.parametrize("max_tokens", [None, 30], ids=["growing", "preallocated"])
@settings(max_examples=150, deadline=None)
@given(operations=st.lists(OPERATIONS, max_size=14))
def test_any_sequence_of_operations_keeps_the_history(hybrid, max_tokens, operations):
    """Against a plain list of all tokens: what comes back, what can be dropped, and that a failure changes nothing."""
    cache = cache_for(hybrid, max_tokens)
    batch = 2
    history = torch.zeros(batch, 0, dtype=torch.float64)  # a tag for each row and token
    next_tag, cropped_at, recording = 1.0, 0, False
    longest = 0  # since it was empty
    for name, argument in operations:
        if name == "update":
            new = torch.arange(next_tag, next_tag + batch * argument, dtype=torch.float64).view(batch, argument)
            next_tag += batch * argument
            k = new[:, None, :, None].expand(-1, 2, -1, 4)
            if max_tokens is not None and history.shape[1] + argument > max_tokens:
                with pytest.raises(CacheFullError):
                    cache.update(k, -k, 0)
                continue
            n = history.shape[1]
            history = torch.cat([history, new], dim=1)
            longest = max(longest, history.shape[1])
            for index, first in enumerate([max(n - WINDOW + 1, 0)] * 2 + [0]):
                keys, values = cache.update(k, -k, index)
                torch.testing.assert_close(keys[:, 0, :, 0], history[:, first:], rtol=0, atol=0)
                torch.testing.assert_close(values, -keys, rtol=0, atol=0)
        elif name == "crop":
            keep = max(history.shape[1] - argument, 0)
            try:
                cache.crop(-argument)
            except RollbackError:
                assert not (recording and keep >= cropped_at)
                assert longest > WINDOW
            else:
                history, cropped_at = history[:, :keep], keep
        elif name == "reorder":
            rows = torch.tensor(argument)[:batch] % batch
            rows = torch.cat([rows, torch.zeros(batch - len(rows), dtype=torch.int64)])
            cache.reorder_cache(rows)
            history = history[rows] if cache.is_initialized else history
        elif name == "repeat" and batch <= 4 and cache.is_initialized:
            cache.batch_repeat_interleave(argument)
            history, batch = history.repeat_interleave(argument, dim=0), batch * argument
        elif name == "select" and cache.is_initialized:
            rows = torch.tensor(argument) % batch
            cache.batch_select_indices(rows)
            history, batch = history[rows], len(rows)
        elif name == "reset":
            cache.reset()
            history, recording = history[:, :0], False
        elif name == "record":
            cropped_at = cropped_at if recording else history.shape[1]
            recording = True
            cache.activate_past_recording()
        elif name == "stop":
            recording = False
            for layer in cache.layers[:2]:
                layer.record_past = False
        elif name == "copy":
            cache = copy.deepcopy(cache)
        elif name == "pickle":
            cache = pickle.loads(pickle.dumps(cache)).attach(hybrid)
        longest = longest if history.shape[1] else 0
        assert lengths(cache) == [history.shape[1]] * 3


@pytest.mark.parametrize("record", [False, True], ids=["", "recording"])
def test_agrees_with_transformers_own_cache(hybrid, record):
    ours, theirs = cache_for(hybrid), DynamicCache(config=hybrid.config)
    if record:
        ours.activate_past_recording()
        theirs.activate_past_recording()
    for step in (3, 1, 1, 7, 1, 2, 4, 1):
        for index in range(3):
            assert ours.get_mask_sizes(step, index) == theirs.get_mask_sizes(step, index)
        for mine, other in zip(fill(ours, step), fill(theirs, step), strict=True):
            assert torch.equal(mine[0], other[0])
            assert torch.equal(mine[1], other[1])
        if record:
            ours.crop(-(step // 2))
            theirs.crop(-(step // 2))
        assert lengths(ours) == lengths(theirs)
        assert ours.get_seq_length() == theirs.get_seq_length()


def test_a5_and_d9_lengths_are_plain_ints_and_snapshots(hybrid):
    """A5, D9: a length is an int in every layer and every cache, and later updates do not change one handed out."""
    for cache in (cache_for(hybrid), cache_for(hybrid, 20), cache_for(t5())):
        own = getattr(cache, "self_attention_cache", cache)
        before = own.get_seq_length(), own.get_mask_sizes(1, 0)
        fill(own, 7)
        assert before == (0, (1, 0))
        for value in (cache.get_seq_length(), *lengths(own), *own.get_mask_sizes(2, 0), cache.get_max_length()):
            assert type(value) is int
        assert cache.get_seq_length() == 7


@pytest.mark.parametrize("stored", [5, 6], ids=["N-1", "N"])
def test_c1_a_full_cache_says_so_before_any_layer_is_written(hybrid, stored):
    """C1: capacity 6; one token too many is refused at the first layer, a sliding one, and nothing has changed."""
    cache = cache_for(hybrid, max_tokens=6)
    fill(cache, stored)
    rows = [layer.keys for layer in cache.layers]
    new = 7 - stored
    message = (
        f"the cache is full: {stored} of 6 tokens stored, {new} more asked for; "
        r"create it with cache_for\(model, max_tokens=7\) or more"
    )
    with pytest.raises(CacheFullError, match=message):
        cache.update(*tagged(stored, new), 0)
    assert lengths(cache) == [stored] * 3
    assert all(torch.equal(old, layer.keys) for old, layer in zip(rows, cache.layers, strict=True))
    fill(cache, 6 - stored)
    assert lengths(cache) == [6] * 3


def test_preallocated_buffers_have_exactly_the_size_asked_for(hybrid):
    cache = cache_for(hybrid, max_tokens=12)
    fill(cache, 3)
    assert [layer.rows.k_cache.shape[2] for layer in cache.layers] == [WINDOW, WINDOW, 12]
    assert cache.nbytes == 2 * 2 * (4 + 3) * (5 + 5 + 12) * 8
    assert (cache.get_max_length(), cache.get_max_length(0)) == (12, WINDOW)
    small = cache_for(hybrid, max_tokens=3)
    fill(small, 3)
    assert [layer.rows.k_cache.shape[2] for layer in small.layers] == [3, 3, 3]


def test_a_growing_cache_has_no_limit_and_an_eighth_to_spare(hybrid):
    cache = cache_for(hybrid)
    assert cache.get_max_length(2) == -1
    sizes = []
    for _ in range(20):
        fill(cache, 1)
        sizes.append([layer.rows.k_cache.shape[2] for layer in cache.layers])
    assert [size[2] for size in sizes] == [1] + [66] * 19
    assert [size[0] for size in sizes] == [1, 2, 4, 4] + [WINDOW] * 16
    fill(cache, 100)
    assert cache.layers[2].rows.k_cache.shape[2] == 120 + 64
    fill(cache, 680)
    assert cache.layers[2].rows.k_cache.shape[2] == 800 + 100


@pytest.mark.parametrize("max_tokens", [520, None], ids=["preallocated", "growing"])
def test_c12_bytes_copied_and_allocated_over_512_steps(max_tokens):
    """C12: preallocated, a step allocates nothing and writes its own rows; growing, all copies together are linear."""
    cache = cache_for(llama(num_hidden_layers=1), max_tokens)
    fill(cache, 8, batch=1)
    k, v = tagged(8, 1, batch=1)
    row = k.nbytes + v.nbytes
    with CountAllocations() as count:
        per_step = []
        for _ in range(512):
            before = count.allocated, count.copied
            cache.update(k, v, 0)
            per_step.append((count.allocated - before[0], count.copied - before[1]))
    if max_tokens is not None:
        assert set(per_step) == {(0, row)}
    else:
        grown = [step for step in per_step if step != (0, row)]
        assert len(grown) == 8  # 8 -> 73 -> 138 -> ... -> 528
        assert count.copied - 512 * row < 5 * 520 * row  # with an eighth to spare never more than 9 times
        assert count.allocated < 6 * 520 * row
        assert cache.nbytes < 2 * 520 * row


def test_c12_a_window_in_use_allocates_no_more_as_it_goes(hybrid):
    cache = cache_for(hybrid)
    fill(cache, 20)
    sizes = set()
    for _ in range(64):
        fill(cache, 1)
        sizes.add(sum(layer.rows.nbytes for layer in cache.layers[:2]))
    assert len(sizes) == 1


@pytest.mark.parametrize("max_tokens", [None, 200], ids=["growing", "preallocated"])
def test_a_window_holds_nothing_of_a_long_prompt_outside_its_buffers(hybrid, max_tokens):
    cache = cache_for(hybrid, max_tokens)
    fill(cache, 100)
    for layer in cache.layers[:2]:
        tensors = [
            leaf for leaf in tree_leaves((vars(layer.rows), vars(layer.rows._store))) if isinstance(leaf, torch.Tensor)
        ]
        held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        assert len(held) >= 2
        assert sum(held.values()) <= layer.rows.nbytes == 2 * 2 * WINDOW * (4 + 3) * 8
        assert not [value for value in vars(layer).values() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("act", ["offload", "prefetch"])
def test_offloading_is_refused(hybrid, act):
    cache = cache_for(hybrid)
    fill(cache, 7)
    before = [layer.keys for layer in cache.layers]
    for layer in cache.layers:
        with pytest.raises(KVCacheError, match="cannot be offloaded"):
            getattr(layer, act)()
    assert all(torch.equal(old, layer.keys) for old, layer in zip(before, cache.layers, strict=True))


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("narrow", ["keys", "values"])
def test_c9_the_wider_dtype_comes_out_and_everything_is_cast_to_it(hybrid, narrow, autocast):
    """C9: keys in float32 and values in bfloat16, or the reverse, give one documented dtype, whatever comes later."""
    cache = cache_for(hybrid)
    k, v = tagged(0, 3, dtype=torch.float32)
    first = (k.bfloat16(), v) if narrow == "keys" else (k, v.bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        for index in range(3):
            cache.update(*first, index)
            keys, values = cache.update(k.bfloat16(), v.double(), index)
            assert (keys.dtype, values.dtype) == (torch.float32, torch.float32)
            assert torch.equal(keys[:, :, -3:], k.bfloat16().float())
            assert torch.equal(values[:, :, -3:], v)


def test_rows_kept_in_another_dtype_come_out_in_the_models(hybrid):
    cache = cache_for(hybrid, storage="bfloat16")
    k = torch.full((1, 2, 3, 4), 1 + 2**-12, dtype=torch.float64)
    for index in range(3):
        keys, _ = cache.update(k, k, index)
        assert keys.dtype == torch.float64
        assert torch.equal(keys, torch.ones_like(k))
        assert cache.layers[index].keys.dtype == torch.float64
        assert cache.layers[index].rows.k_cache.dtype == torch.bfloat16


@pytest.mark.parametrize("stored", [0, 4, 12])
def test_k1_no_tokens_change_nothing(hybrid, stored):
    """K1: an update of length 0 is allowed and changes nothing."""
    cache = cache_for(hybrid)
    fill(cache, stored)
    before = [layer.keys for layer in cache.layers]
    fill(cache, 0)
    assert lengths(cache) == [stored] * 3
    for old, layer in zip(before, cache.layers, strict=True):
        assert layer.keys is old is None or torch.equal(old, layer.keys)


def test_a_failed_first_update_leaves_the_layer_unwritten(hybrid):
    cache = cache_for(hybrid)
    k, v = tagged(0, 3)
    with pytest.raises(InvalidValueError, match=r"v_new has shape \(2, 1, 3, 3\)"):
        cache.update(k, v[:, :1], 2)
    assert not cache.layers[2].is_initialized
    fill(cache, 3, batch=5)
    assert cache.batch_size == 5


def test_another_batch_size_is_refused_until_reset(hybrid):
    cache = cache_for(hybrid)
    fill(cache, 6, batch=2)
    with pytest.raises(InvalidValueError, match=r"the cache holds 2 sequences, the input has 3; reset\(\) the cache"):
        fill(cache, 1, batch=3)
    assert lengths(cache) == [6] * 3
    cache.reset()
    fill(cache, 4, batch=3)
    assert cache.batch_size == 3


def test_early_initialization_allocates_without_tokens(hybrid):
    cache = cache_for(hybrid, max_tokens=9)
    cache.early_initialization(2, 2, 4, torch.float32, torch.device("cpu"))
    assert cache.is_initialized
    assert lengths(cache) == [0] * 3
    assert cache.nbytes == 2 * 2 * 8 * (5 + 5 + 9) * 4
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 4
