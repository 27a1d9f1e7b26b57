"""The rows of the batch of any cache: selected, repeated, reordered."""

import pytest
import torch

from kvcache import InvalidTypeError, InvalidValueError
from tests.oracle import assert_close, attend_rows
from tests.storage.histories import (
    check_attends_like_the_history,
    content,
    every_kind,
    filled,
    random_queries,
    random_tokens,
    rule_of,
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
    assert (cache.state["k"] == 1).all()
    assert (cache.state["v"] == 2).all()


@every_kind
@pytest.mark.parametrize("length", [0, 2, 11])
def test_rows_of_the_batch_follow_the_index(kind, length):  # case D8
    for act, rows in (
        (lambda c: c.reorder([1, 1]), [1, 1]),
        (lambda c: c.reorder(torch.tensor([1, 0])), [1, 0]),
        (lambda c: c.select([1]), [1]),
        (lambda c: c.select([1, 0, 1]), [1, 0, 1]),
        (lambda c: c.repeat(1), [0, 1]),
        (lambda c: c.repeat(3), [0, 0, 0, 1, 1, 1]),
    ):
        cache, k, v = filled(kind, length)
        assert act(cache) is None
        assert (cache.batch_size, cache.seq_len) == (len(rows), length)
        new_k, new_v = random_tokens(1, batch=len(rows), seed=1)
        cache.update(new_k, new_v)
        history = [torch.cat([old[rows], new], dim=2) for old, new in ((k, new_k), (v, new_v))]
        check_attends_like_the_history(cache, kind, *history)


@every_kind
def test_rows_kept_in_a_narrower_dtype_stay_what_they_are(kind):
    cache, k, v = filled(kind, 9, dtype=torch.float32, storage="bfloat16")
    cache.reorder([1, 0])
    cache = cache.copy()
    cache.repeat(2)
    cache.select([0, 3, 2])
    assert (cache.dtype, cache.storage, cache.k_cache.dtype) == (torch.float32, "bfloat16", torch.bfloat16)
    rows = [1, 0, 0]
    new_k, new_v = random_tokens(1, batch=3, seed=1)
    cache.append(new_k, new_v)
    history = [torch.cat([old[rows], new], dim=2).bfloat16() for old, new in ((k, new_k), (v, new_v))]
    q = random_queries(1, batch=3).float()
    output = cache.attend(q)
    assert output.dtype == torch.float32
    assert_close(output, attend_rows(q, *history, **rule_of(kind))[0])


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
