"""Copies of any cache: by copying, by pickling, by its state, with other sizes, on another device."""

import json

import pytest
import torch

from kvcache import InvalidTypeError, InvalidValueError
from tests.oracle import attend_rows
from tests.storage.caches import COPIES, STORED_KINDS, random_tokens
from tests.storage.histories import (
    check_attends,
    check_attends_like_the_history,
    content,
    encoded_one_by_one,
    every_kind,
    filled,
    random_queries,
    rule_of,
)


@every_kind
@pytest.mark.parametrize("length", [0, 11])
def test_copies_are_equal_and_independent(kind, length):  # case C14
    cache, k, v = filled(kind, length)
    before = content(cache)
    copies = {way: copied(cache) for way, copied in COPIES.items()}
    for way, other in copies.items():
        assert type(other) is type(cache), way
        assert repr(other) == repr(cache), way
        assert content(other) == before, way
        assert other.nbytes == cache.nbytes, way
    new, own = kind.tokens(2, seed=1), kind.tokens(2, seed=2)
    for other in copies.values():
        other.update(*new)
    assert content(cache) == before
    cache.update(*own)
    q = random_queries(2)
    for branches, tokens in ((copies.values(), new), ([cache], own)):
        history = (torch.cat(parts, dim=2) for parts in zip((k, v), tokens, strict=True))
        expected = attend_rows(q, *history, **rule_of(kind))
        for branch in branches:
            check_attends(branch, q, *expected)


@every_kind
@pytest.mark.parametrize("length", [0, 3, 11])
def test_stored_rows_are_in_order_of_position_as_they_are_kept(kind, length):
    cache, k, v = filled(kind, length, v_head_dim=3)
    cache.append(*random_tokens(1, v_head_dim=3, seed=1))
    cache.rollback(1)
    sinks = min(kind.sinks, length)
    newest = cache.stored_len - sinks
    positions = [*range(sinks), *range(length - newest, length)]
    kept = encoded_one_by_one(cache.storage, k[:, :, positions], v[:, :, positions])
    for rows, buffer, expected in zip(cache.stored_rows(), (cache.k_cache, cache.v_cache), kept, strict=True):
        assert rows.dtype == buffer.dtype
        assert torch.equal(rows, expected)
    for rows, expected in zip(cache.decoded_rows(), (k, v), strict=True):
        assert torch.equal(rows, expected[:, :, positions])


resizable_kinds = pytest.mark.parametrize("kind", [kind for kind in STORED_KINDS if kind.resizable], ids=str)


@resizable_kinds
@pytest.mark.parametrize("length", [0, 20])
def test_resized_caches_are_independent_and_hold_the_same(kind, length):
    cache, k, v = filled(kind, length)
    before = content(cache)
    size = kind.resizable[0]
    larger = cache.resized(**{size: getattr(cache, size) + 9})
    assert type(larger) is type(cache)
    assert content(larger) == {**before, size: before[size] + 9}
    assert larger.k_cache.shape[2] == cache.k_cache.shape[2] + 9
    new_k, new_v = kind.tokens(2, seed=1)
    larger.append(new_k, new_v)
    assert content(cache) == before
    check_attends_like_the_history(larger, kind, torch.cat([k, new_k], 2), torch.cat([v, new_v], 2), queries=2)
    cache.reset()
    assert larger.seq_len == length + 2


@resizable_kinds
def test_bad_new_sizes_change_nothing(kind):
    cache, k, v = filled(kind, 20)
    before = content(cache)
    for name in kind.resizable:
        minimum = 1 if name == "window" else 0
        with pytest.raises(InvalidValueError, match=f"{name} is {minimum - 1}"):
            cache.resized(**{name: minimum - 1})
        with pytest.raises(InvalidTypeError, match=f"{name} is a float"):
            cache.resized(**{name: 30.0})
    with pytest.raises(TypeError, match="sinks"):
        cache.resized(sinks=1)
    assert content(cache) == before
    check_attends_like_the_history(cache, kind, k, v)


@every_kind
def test_state_holds_the_stored_rows_and_plain_data(kind):
    cache, k, v = filled(kind, 11)
    state = cache.state
    assert set(state) == {"k", "v"}
    for rows in state.values():
        assert rows.shape[2] == cache.stored_len
        assert rows.is_contiguous()
        assert rows.untyped_storage().nbytes() == rows.nbytes
    assert json.loads(json.dumps(cache.meta_state)) == cache.meta_state
    assert all(value is None or type(value) in (int, str) for value in cache.meta_state.values())
    for act in (lambda s: s.update(x=k), lambda s: s.pop("v"), lambda s: s.update(v=v[:, :, :0])):
        broken = cache.state
        act(broken)
        with pytest.raises(InvalidValueError, match="state"):
            type(cache).from_state(broken, cache.meta_state)
    for change in ({"type": "Other"}, {"version": 99}, {"seq_len": 0}, {"extra": 1}):
        with pytest.raises(InvalidValueError, match="state"):
            type(cache).from_state(cache.state, {**cache.meta_state, **change})
    for name, arguments in (("state", (None, cache.meta_state)), ("meta_state", (cache.state, [1]))):
        with pytest.raises(InvalidTypeError, match=f"{name} is a (NoneType|list); expected a dict"):
            type(cache).from_state(*arguments)


@every_kind
def test_caches_made_in_inference_mode_work_outside_of_it(kind):
    with torch.inference_mode():
        cache = kind()
        k, v = kind.tokens(3)
        cache.update(k, v)
        cache.reorder([0, 1])
        other = cache.copy()
        other.repeat(2)
        other.select([0, 2])
    other.update(k, v)
    new_k, new_v = kind.tokens(2, seed=1)
    cache.update(new_k, new_v)
    check_attends_like_the_history(cache, kind, torch.cat([k, new_k], 2), torch.cat([v, new_v], 2), queries=2)
    with torch.inference_mode():
        cache.update(new_k, new_v)


@every_kind
def test_to_moves_in_place_and_returns_the_cache(kind):
    cache, k, v = filled(kind, 6)
    assert cache.to("cpu") is cache
    with pytest.raises(InvalidValueError, match="device is 'nowhere'"):
        cache.to("nowhere")
    check_attends_like_the_history(cache, kind, k, v)
    assert cache.copy().to("meta").device.type == "meta"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device")
def test_to_another_device_and_back_keeps_the_bits():
    for kind in STORED_KINDS:
        cache = kind(head_dim=40, v_head_dim=33)
        cache.append(*random_tokens(9, head_dim=40, v_head_dim=33))
        before = content(cache)
        assert cache.to("cuda").device.type == "cuda", kind
        assert content(cache) == before, kind
        assert content(cache.to("cpu")) == before, kind
