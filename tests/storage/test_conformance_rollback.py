"""Going back in any cache: dropping the newest tokens, or all of them."""

import pytest
import torch

from kvcache import InvalidTypeError, InvalidValueError, RollbackError
from tests.oracle import attend_rows
from tests.storage.caches import STORED_KINDS, random_tokens
from tests.storage.histories import (
    NAN,
    check_attends,
    check_attends_like_the_history,
    content,
    every_kind,
    filled,
    random_queries,
    rule_of,
)


@every_kind
def test_rollback_and_retry_equals_never_having_appended(kind):  # cases E7, I1
    lengths = range(1, 14) if kind.storage is None else [10]  # which rows stay is the same in every storage
    (k, v), (new_k, new_v) = kind.tokens(lengths[-1]), kind.tokens(2, seed=1)
    q = random_queries(2, heads=2)
    expected = [
        attend_rows(q, torch.cat([k[:, :, :kept], new_k], 2), torch.cat([v[:, :, :kept], new_v], 2), **rule_of(kind))
        for kept in range(lengths[-1] + 1)
    ]
    for length in lengths:
        for dropped in range(length + 1):
            cache = kind()
            cache.append(k[:, :, :length], v[:, :, :length])
            if not cache.can_rollback(dropped):
                before = content(cache)
                with pytest.raises(RollbackError, match=f"cannot drop its last {dropped} tokens"):
                    cache.rollback(dropped)
                assert content(cache) == before
                continue
            cache.rollback(dropped)
            assert cache.seq_len == length - dropped
            cache.update(new_k, new_v)
            check_attends(cache, q, *expected[length - dropped])


@every_kind
def test_rows_that_stay_are_the_same_bits_after_50_rollbacks_and_refills(kind):
    cache = kind(head_dim=40, v_head_dim=33)
    cache.append(*random_tokens(30, head_dim=40, v_head_dim=33))
    before = cache.copy().stored_rows()
    dropped = max(n for n in range(5) if cache.can_rollback(n))
    stay = cache.stored_len - dropped
    for seed in range(1, 51):
        cache.rollback(dropped)
        refill = random_tokens(dropped, head_dim=40, v_head_dim=33, seed=seed)
        cache.append(*(rows * 10.0 ** (seed % 7 - 3) for rows in refill))
        for kept, original in zip(cache.stored_rows(), before, strict=True):
            assert torch.equal(kept[:, :, :stay], original[:, :, :stay])
            assert not torch.equal(kept[:, :, stay:], original[:, :, stay:])


def test_layers_of_every_kind_are_cut_alike():  # case G5
    layers = [(kind, *filled(kind, 9)) for kind in STORED_KINDS]
    for kind, cache, k, v in layers:
        cache.truncate(8)
        assert cache.seq_len == 8
        new_k, new_v = kind.tokens(1, seed=1)
        cache.append(new_k, new_v)
        history = (torch.cat([old[:, :, :8], new], dim=2) for old, new in ((k, new_k), (v, new_v)))
        check_attends_like_the_history(cache, kind, *history)


@every_kind
def test_rolling_back_nothing_or_everything_is_always_right(kind):  # case D3
    cache, k, v = filled(kind, 4)
    cache.rollback(0)
    check_attends_like_the_history(cache, kind, k, v)
    for bad in (5, 6, 9):
        with pytest.raises(InvalidValueError, match=f"n is {bad}; expected at most seq_len = 4"):
            cache.rollback(bad)
        with pytest.raises(InvalidValueError, match=f"length is {bad}; expected at most seq_len = 4"):
            cache.truncate(bad)
        assert not cache.can_rollback(bad)
    with pytest.raises(InvalidValueError, match="n is -1"):
        cache.rollback(-1)
    with pytest.raises(InvalidValueError, match="length is -1"):
        cache.truncate(-1)
    with pytest.raises(InvalidTypeError, match="n is a str"):
        cache.rollback("1")
    cache.truncate(4)
    assert cache.seq_len == 4
    cache.truncate(3)
    assert cache.seq_len == 3
    cache.rollback(3)
    assert (cache.seq_len, cache.stored_len) == (0, 0)


@every_kind
def test_rows_dropped_by_rollback_or_reset_are_never_read(kind):  # cases B7, C6
    cache, k, v = filled(kind, 3)
    cache.update(torch.full_like(k[:, :, :1], NAN), torch.full_like(v[:, :, :1], NAN))
    cache.rollback(1)
    new_k, new_v = kind.tokens(1, seed=1)
    cache.update(new_k, new_v)
    check_attends_like_the_history(cache, kind, torch.cat([k, new_k], 2), torch.cat([v, new_v], 2))
    cache.update(torch.full_like(k, NAN), torch.full_like(v, NAN))
    cache.reset()
    assert (cache.seq_len, cache.stored_len) == (0, 0)
    cache.update(new_k, new_v)
    assert cache.stored_len == 1
    check_attends_like_the_history(cache, kind, new_k, new_v)
