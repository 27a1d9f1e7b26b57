"""Appending to any cache: what is stored, what is refused, and what it costs."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from kvcache import CacheFullError, InvalidTypeError, InvalidValueError
from tests.allocations import CountAllocations
from tests.oracle import assert_close, attend_rows, visible_positions
from tests.storage.histories import (
    NAN,
    check_attends_like_the_history,
    content,
    every_kind,
    filled,
    random_queries,
    random_tokens,
    rule_of,
)


@every_kind
@given(chunks=st.lists(st.integers(0, 9), max_size=8))
@settings(max_examples=40)
def test_chunks_of_every_size_equal_one_run(kind, chunks):  # cases B3, C5, E2, E3, E5
    total = min(sum(chunks), kind.capacity or 40)
    k, v = random_tokens(total)
    q = random_queries(total)
    expected, _ = attend_rows(q, k, v, **rule_of(kind))
    updated, appended, end = kind(), kind(), 0
    for size in chunks:
        start, end = end, min(end + size, total)
        new = k[:, :, start:end], v[:, :, start:end]
        seen_k, seen_v = updated.update(*new)
        assert appended.append(*new) is None
        assert updated.seq_len == updated.get_seq_len() == appended.seq_len == end
        visible = sorted({p for t in range(start, end) for p in visible_positions(t, **rule_of(kind))})
        if end > start:
            assert torch.equal(seen_k, k[:, :, visible])
            assert torch.equal(seen_v, v[:, :, visible])
            for cache in (updated, appended):
                assert_close(cache.attend(q[:, :, start:end]), expected[:, :, start:end])
    assert content(appended) == content(updated)


@every_kind
def test_slots_never_written_are_never_read(kind):  # case B7
    cache = kind()
    cache.k_cache.fill_(NAN)
    cache.v_cache.fill_(NAN)
    k, v = random_tokens(6)
    cache.update(k, v)
    check_attends_like_the_history(cache, kind, k, v, queries=6)
    cache.rollback(1)
    k, v = k[:, :, :5], v[:, :, :5]
    new_k, new_v = random_tokens(1, seed=1)
    cache.append(new_k, new_v)
    check_attends_like_the_history(cache, kind, torch.cat([k, new_k], 2), torch.cat([v, new_v], 2))


@every_kind
@pytest.mark.parametrize("method", ["update", "append"])
def test_refused_tokens_change_nothing(kind, method):  # cases B14, C3
    cache, k, v = filled(kind, 6)
    store = getattr(cache, method)
    before = content(cache)
    good, _ = random_tokens(2)
    bad_tokens = [
        (good[0], good, InvalidValueError, "k_new has shape"),
        (good, good[0], InvalidValueError, "v_new has shape"),
        (good[:1], good[:1], InvalidValueError, r"k_new has shape .* = \(2, 2, any, 4\)"),
        (good[:, :1], good[:, :1], InvalidValueError, "k_new has shape"),
        (good, good[:, :, :1], InvalidValueError, r"v_new has shape .* = \(2, 2, 2, 4\)"),
        (good[..., :3], good, InvalidValueError, "k_new has shape"),
        (good.int(), good, InvalidTypeError, "k_new has dtype int32"),
        (good, good.tolist(), InvalidTypeError, "v_new is a list"),
        (None, good, InvalidTypeError, "k_new is a NoneType"),
        (good.to("meta"), good, InvalidValueError, "k_new is on meta; expected cpu"),
        (good, good.to("meta"), InvalidValueError, "v_new is on meta; expected cpu"),
    ]
    for k_new, v_new, error, message in bad_tokens:
        with pytest.raises(error, match=message):
            store(k_new, v_new)
    if kind.capacity:
        many_k, many_v = random_tokens(kind.capacity - 5)
        with pytest.raises(CacheFullError, match=f"6 of {kind.capacity} tokens stored, {kind.capacity - 5} more"):
            store(many_k, many_v)
    assert content(cache) == before
    check_attends_like_the_history(cache, kind, k, v)


@every_kind
@pytest.mark.parametrize("method", ["update", "append"])
def test_no_tokens_change_nothing(kind, method):  # case K1
    cache, k, v = filled(kind, 6)
    before = content(cache)
    empty = random_tokens(0)
    getattr(cache, method)(*empty)
    assert content(cache) == before
    assert cache.attend(random_queries(0)).shape == (2, 4, 0, 4)
    check_attends_like_the_history(cache, kind, k, v)
    fresh = kind()
    seen = getattr(fresh, method)(*empty)
    assert seen is None if method == "append" else seen[0].shape == (2, 2, 0, 4)
    assert fresh.attend(random_queries(0)).shape == (2, 4, 0, 4)


@every_kind
@pytest.mark.parametrize("autocast", [False, True])
def test_what_is_stored_is_cast_by_value(kind, autocast):  # case C9
    cache, appended = kind(dtype=torch.bfloat16), kind(dtype=torch.bfloat16)
    k, v = random_tokens(3)
    for t in range(3):  # prefill and decode write alike
        new = k[:, :, t : t + 1].float(), v[:, :, t : t + 1].bfloat16()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            seen_k, seen_v = cache.update(*new)
            appended.append(*new)
    assert seen_k.dtype == seen_v.dtype == torch.bfloat16
    newest = visible_positions(2, **rule_of(kind))
    assert torch.equal(seen_k, k.bfloat16()[:, :, newest])
    assert torch.equal(seen_v, v.bfloat16()[:, :, newest])
    one_shot = kind(dtype=torch.bfloat16)
    one_shot.update(k, v)
    assert content(one_shot) == content(cache) == content(appended)


@every_kind
def test_storage_may_be_narrower_than_what_comes_out(kind):
    cache = kind(dtype=torch.float32, storage="bfloat16")
    k, v = random_tokens(2)
    seen_k, seen_v = cache.update(k, v)
    visible = sorted({p for t in range(2) for p in visible_positions(t, **rule_of(kind))})
    assert seen_k.dtype == seen_v.dtype == cache.dtype == torch.float32
    assert torch.equal(seen_k, k.bfloat16().float()[:, :, visible])
    assert torch.equal(seen_v, v.bfloat16().float()[:, :, visible])
    assert cache.k_cache.dtype == torch.bfloat16
    assert (cache.storage, cache.nbytes) == ("bfloat16", kind(dtype=torch.bfloat16).nbytes)
    q = random_queries(1).float()
    assert_close(cache.attend(q), attend_rows(q, k.bfloat16(), v.bfloat16(), **rule_of(kind))[0])


@every_kind
def test_inputs_of_any_layout_are_stored_by_value(kind):  # case B12
    k, v = random_tokens(5)
    plain, strided, expanded = kind(), kind(), kind()
    plain.update(k, v)
    wide = torch.stack([k, torch.full_like(k, NAN)], dim=-1)
    strided.update(wide[..., 0], v.transpose(1, 2).contiguous().transpose(1, 2))
    assert content(strided) == content(plain)
    expanded.update(k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1))
    plain.reorder([0, 0])
    assert content(expanded) == content(plain)
    before = content(strided)
    k.fill_(NAN)  # the cache holds copies
    v.fill_(NAN)
    wide.fill_(NAN)
    assert content(strided) == before
    assert content(expanded) == content(plain)


@every_kind
def test_bytes_are_known_and_constant(kind):
    cache = kind()
    expected = cache.nbytes
    assert expected == cache.k_cache.untyped_storage().nbytes() + cache.v_cache.untyped_storage().nbytes()
    buffers = cache.k_cache.data_ptr(), cache.v_cache.data_ptr()
    for t in range(20):
        cache.update(*random_tokens(1, seed=t))
    cache.reorder([1, 0])
    cache.rollback(1)
    cache.reset()
    assert cache.nbytes == expected
    assert buffers == (cache.k_cache.data_ptr(), cache.v_cache.data_ptr())


@every_kind
@pytest.mark.parametrize("length", [0, 3, 20])
def test_bytes_of_a_token_and_of_what_is_stored(kind, length):
    cache, _, _ = filled(kind, length, v_head_dim=3, storage="float16")
    assert cache.token_nbytes == 2 * 2 * (4 + 3) * 2
    assert cache.stored_nbytes == cache.stored_len * cache.token_nbytes
    assert cache.nbytes == cache.k_cache.shape[2] * cache.token_nbytes
    cache.repeat(3)
    assert cache.token_nbytes == 6 * 2 * (4 + 3) * 2
    assert type(cache.token_nbytes) is type(cache.stored_nbytes) is int


@every_kind
@pytest.mark.parametrize("storage", [None, "bfloat16"])
def test_appending_a_token_makes_at_most_its_own_rows(kind, storage):  # case C12
    cache, _, _ = filled(kind, 30, storage=storage)
    k, v = random_tokens(1)
    with CountAllocations() as count:
        for _ in range(3):
            cache.append(k, v)
    assert count.allocated <= 3 * cache.token_nbytes
    assert count.copied == 3 * cache.token_nbytes


@every_kind
def test_bad_sizes_are_named(kind):
    good = {"batch_size": 1, "num_heads": 1, "head_dim": 4}
    for name in good:
        for bad, error in ((0, InvalidValueError), (-1, InvalidValueError), (1.0, InvalidTypeError)):
            with pytest.raises(error, match=f"{name} is"):
                kind(**{**good, name: bad})
    for name, bad, error in (
        ("v_head_dim", 0, InvalidValueError),
        ("dtype", torch.int8, InvalidValueError),
        ("dtype", "float31", InvalidValueError),
        ("dtype", 4, InvalidTypeError),
        ("storage", "int9", InvalidValueError),
        ("device", "nowhere", InvalidValueError),
    ):
        with pytest.raises(error, match=f"{name} is"):
            kind(**{**good, name: bad})
