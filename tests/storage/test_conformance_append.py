"""Appending to any cache: what is stored, what is refused, and what it costs."""

from functools import cache as remembered

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings

from kvcache import CacheFullError, InvalidTypeError, InvalidValueError
from tests.allocations import CountAllocations
from tests.oracle import assert_close, attend_rows, visible_positions
from tests.storage.caches import ENCODED_STORAGES, STORED_KINDS, random_tokens
from tests.storage.histories import (
    NAN,
    check_attends_like_the_history,
    content,
    decoded,
    encoded_one_by_one,
    every_kind,
    every_plain_kind,
    filled,
    random_queries,
    rule_of,
)


@remembered
def history(kind):
    """Return the queries, keys and values of 40 tokens, and what the queries' attention gives."""
    q, (k, v) = random_queries(40, heads=2), kind.tokens(40)
    return q, k, v, attend_rows(q, k, v, **rule_of(kind))[0]


def seen_by(kind, start, end):
    """Return the positions that any query of the tokens [start, end) sees."""
    return sorted({p for t in range(start, end) for p in visible_positions(t, **rule_of(kind))})


@every_kind
@given(chunks=st.lists(st.integers(0, 9), max_size=8))
@example(chunks=[9, 1, 0, 1, 7, 9, 5, 1])
@settings(max_examples=5)
def test_chunks_of_every_size_equal_one_run(kind, chunks):  # cases B3, C5, E2, E3, E5
    q, k, v, expected = history(kind)
    total = min(sum(chunks), 40)
    updated, appended, end = kind(), kind(), 0
    for size in chunks:
        start, end = end, min(end + size, total)
        new = k[:, :, start:end], v[:, :, start:end]
        seen_k, seen_v = updated.update(*new)
        assert appended.append(*new) is None
        assert updated.seq_len == updated.get_seq_len() == appended.seq_len == end
        if end > start:
            visible = seen_by(kind, start, end)
            assert torch.equal(seen_k, k[:, :, visible])
            assert torch.equal(seen_v, v[:, :, visible])
            for cache in (updated, appended):
                assert_close(cache.attend(q[:, :, start:end]), expected[:, :, start:end])
    assert content(appended) == content(updated)


@every_kind
def test_what_an_update_returned_can_be_asked_for_later(kind):
    k, v = kind.tokens(13)
    updated, appended = kind(), kind()
    for new in (slice(0, 9), slice(9, 10), slice(10, 13)):
        seen = updated.update(k[:, :, new], v[:, :, new])
        appended.append(k[:, :, new], v[:, :, new])
        for rows, expected in zip(appended.visible_rows(new.stop - new.start), seen, strict=True):
            assert torch.equal(rows, expected)
    for wrong in (-1, 14):
        with pytest.raises(InvalidValueError, match=f"num_queries is {wrong}; expected"):
            appended.visible_rows(wrong)


@every_kind
def test_chunks_store_the_bits_that_one_run_stores(kind):
    sizes = {"head_dim": 40, "v_head_dim": 33}  # groups of 32 and 8 channels, and of 32 and 1
    k, v = random_tokens(23, **sizes)
    one_shot = kind(**sizes)
    one_shot.append(k, v)
    for size in (1, 2, 5, 22):
        cache = kind(**sizes)
        for start in range(0, 23, size):
            cache.append(k[:, :, start : start + size], v[:, :, start : start + size])
        assert content(cache) == content(one_shot)


@every_kind
def test_each_row_is_stored_as_if_it_were_alone(kind):
    sizes = {"head_dim": 40, "v_head_dim": 33}
    k, v = random_tokens(5, **sizes)
    for rows in (k, v):  # neighbours in the batch, the heads, the step and the group are much larger or smaller
        for neighbours in (rows[1:], rows[:, 1:], rows[:, :, 1::2], rows[..., 32:]):
            neighbours *= 30
    cache = kind(**sizes)
    seen = cache.update(k, v)
    kept = encoded_one_by_one(cache.storage, k, v)
    stored = [*range(min(kind.sinks, 5)), *range(5 - cache.stored_len + min(kind.sinks, 5), 5)]
    for rows, expected in zip(cache.stored_rows(), kept, strict=True):
        assert rows.dtype == expected.dtype
        assert torch.equal(rows, expected[:, :, stored])
    for rows, expected in zip(seen, decoded(cache.storage, *kept, **sizes), strict=True):
        assert torch.equal(rows, expected[:, :, seen_by(kind, 0, 5)])


@every_kind
def test_storing_what_came_out_again_stores_the_same_bits(kind):
    sizes = {"head_dim": 40, "v_head_dim": 33}
    cache, again = kind(**sizes), kind(**sizes)
    cache.append(*random_tokens(1, **sizes))
    again.append(*cache.decoded_rows())
    assert content(again) == content(cache)


def poison(buffer):
    """Fill a cache's buffer with what reads as NaN, however it keeps rows."""
    buffer.fill_(255 if buffer.dtype == torch.uint8 else NAN)


@every_kind
def test_slots_never_written_are_never_read(kind):  # case B7
    cache = kind()
    poison(cache.k_cache)
    poison(cache.v_cache)
    k, v = kind.tokens(6)
    cache.update(k, v)
    check_attends_like_the_history(cache, kind, k, v, queries=6)
    cache.rollback(1)
    k, v = k[:, :, :5], v[:, :, :5]
    new_k, new_v = kind.tokens(1, seed=1)
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


@every_plain_kind
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_comes_out_has_the_dtype_asked_for_whatever_is_stored(kind, dtype):
    cache = kind(dtype=dtype)
    k, v = random_tokens(3)
    seen = cache.update(k, v)
    kept = decoded(cache.storage, *encoded_one_by_one(cache.storage, k, v))
    for rows, expected in zip(seen, kept, strict=True):
        assert rows.dtype == cache.dtype == dtype
        assert torch.equal(rows, expected[:, :, seen_by(kind, 0, 3)].to(dtype))
    assert cache.storage == kind.storage or str(dtype) == f"torch.{cache.storage}"
    q = random_queries(1).to(dtype)
    output = cache.attend(q)
    assert output.dtype == dtype
    assert_close(output, attend_rows(q, *kept, **rule_of(kind))[0])


@every_kind
def test_inputs_of_any_layout_are_stored_by_value(kind):  # case B12
    sizes = {"head_dim": 40, "v_head_dim": 33}
    k, v = random_tokens(5, **sizes)
    plain, strided, expanded = kind(**sizes), kind(**sizes), kind(**sizes)
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


@pytest.mark.parametrize("kind", [kind for kind in STORED_KINDS if not kind.grows], ids=str)
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


BYTES_OF_A_ROW = {  # of 40 channels, of 33
    None: (320, 264),
    "float32": (160, 132),
    "bfloat16": (80, 66),
    "float16": (80, 66),
    "int8": (8 + 40, 8 + 33),  # two groups of 4 bytes, then the codes
    "int4": (8 + 20, 8 + 17),
    "int8/int4": (8 + 40, 8 + 17),
}


@every_kind
@pytest.mark.parametrize("length", [0, 3, 20])
def test_bytes_of_a_token_and_of_what_is_stored(kind, length):
    cache, _, _ = filled(kind, length, head_dim=40, v_head_dim=33)
    expected = 2 * 2 * sum(BYTES_OF_A_ROW[kind.storage])
    assert cache.token_nbytes == expected
    assert cache.stored_nbytes == cache.stored_len * expected
    assert cache.nbytes == cache.k_cache.shape[:3].numel() * sum(BYTES_OF_A_ROW[kind.storage])
    assert cache.nbytes == cache.k_cache.untyped_storage().nbytes() + cache.v_cache.untyped_storage().nbytes()
    cache.repeat(3)
    assert cache.token_nbytes == 3 * expected
    assert type(cache.token_nbytes) is type(cache.stored_nbytes) is int


@pytest.mark.parametrize(
    "kind", [kind for kind in STORED_KINDS if not kind.grows and kind.storage not in ENCODED_STORAGES], ids=str
)
def test_appending_a_token_makes_at_most_its_own_rows(kind):  # case C12
    cache, _, _ = filled(kind, 30)
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
