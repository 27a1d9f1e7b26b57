"""The rows of the batch of any cache: selected, repeated, reordered."""

import pytest
import torch

from kvcache import InvalidTypeError, InvalidValueError
from tests.storage.caches import random_tokens
from tests.storage.histories import (
    check_attends_like_the_history,
    content,
    encoded_one_by_one,
    every_kind,
    filled,
)


@every_kind
def test_keys_and_values_stay_apart_through_batch_operations(kind):  # case D1
    cache = kind(batch_size=3)
    ones = torch.ones(3, 2, 4, 4, dtype=torch.float64)
    cache.update(ones, 2 * ones)
    cache.select([0, 2])
    cache.repeat(2)
    cache.reorder([3, 2, 1, 0])
    cache = cache.copy()
    assert cache.batch_size == 4
    k, v = cache.decoded_rows()
    assert (k == 1).all()
    assert (v == 2).all()


@every_kind
@pytest.mark.parametrize("length", [0, 11])
def test_rows_of_the_batch_follow_the_index(kind, length):  # case D8
    original, k, v = filled(kind, length)
    for act, rows in (
        (lambda c: c.reorder([1, 1]), [1, 1]),
        (lambda c: c.reorder(torch.tensor([1, 0])), [1, 0]),
        (lambda c: c.select([1]), [1]),
        (lambda c: c.select([1, 0, 1]), [1, 0, 1]),
        (lambda c: c.repeat(1), [0, 1]),
        (lambda c: c.repeat(3), [0, 0, 0, 1, 1, 1]),
    ):
        cache = original.copy()
        assert act(cache) is None
        assert (cache.batch_size, cache.seq_len) == (len(rows), length)
        new_k, new_v = kind.tokens(1, batch=len(rows), seed=1)
        cache.update(new_k, new_v)
        history = [torch.cat([old[rows], new], dim=2) for old, new in ((k, new_k), (v, new_v))]
        check_attends_like_the_history(cache, kind, *history)


@every_kind
def test_batch_operations_move_rows_as_they_are_kept(kind):
    cache = kind(head_dim=40, v_head_dim=33)
    cache.append(*random_tokens(9, head_dim=40, v_head_dim=33))
    before = cache.copy().stored_rows()
    cache.reorder([1, 0])
    cache = cache.copy()
    cache.repeat(2)
    cache.select([0, 3, 2])
    rows = [1, 0, 0]
    for kept, original in zip(cache.stored_rows(), before, strict=True):
        assert kept.dtype == original.dtype
        assert torch.equal(kept, original[rows])
    new_k, new_v = random_tokens(1, batch=3, head_dim=40, v_head_dim=33, seed=1)
    cache.append(new_k, new_v)
    for kept, new in zip(cache.stored_rows(), encoded_one_by_one(cache.storage, new_k, new_v), strict=True):
        assert torch.equal(kept[:, :, -1:], new)


@every_kind
def test_bad_batch_operations_change_nothing(kind):
    cache, _, _ = filled(kind, 6)
    before = content(cache)
    for act, error, message in (
        (lambda: cache.reorder([0]), InvalidValueError, "index has 1 entries; expected batch_size = 2"),
        (lambda: cache.reorder([0, 2]), InvalidValueError, "index holds 2"),
        (lambda: cache.select([-1]), InvalidValueError, "index holds -1"),
        (lambda: cache.select([]), InvalidValueError, "index is empty"),
        (lambda: cache.select([True, False]), InvalidTypeError, "index has dtype bool"),
        (lambda: cache.select([[0, 1]]), InvalidValueError, "index has shape"),
        (lambda: cache.select([0.0]), InvalidTypeError, "index has dtype float32"),
        (lambda: cache.select(None), InvalidTypeError, "index is a NoneType"),
        (lambda: cache.repeat(0), InvalidValueError, "n is 0"),
        (lambda: cache.repeat(1.5), InvalidTypeError, "n is a float"),
    ):
        with pytest.raises(error, match=message):
            act()
    assert content(cache) == before
