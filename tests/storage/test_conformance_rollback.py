"""Going back in any cache: dropping the newest tokens, or all of them."""

import pytest
import torch

from kvcache import InvalidTypeError, InvalidValueError, RollbackError
from tests.storage.histories import NAN, check_attends_like_the_history, content, every_kind, filled, random_tokens


@every_kind
def test_rollback_and_retry_equals_never_having_appended(kind):  # cases E7, I1
    for length in range(1, 14):
        for dropped in range(length + 1):
            cache, k, v = filled(kind, length)
            before = content(cache)
            if not cache.can_rollback(dropped):
                with pytest.raises(RollbackError, match=f"cannot drop its last {dropped} tokens"):
                    cache.rollback(dropped)
                assert content(cache) == before
                continue
            cache.rollback(dropped)
            assert cache.seq_len == length - dropped
            new_k, new_v = random_tokens(2, seed=1)
            k, v = (torch.cat([old[:, :, : length - dropped], new], dim=2) for old, new in ((k, new_k), (v, new_v)))
            cache.update(new_k, new_v)
            check_attends_like_the_history(cache, kind, k, v, queries=2)


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
    new_k, new_v = random_tokens(1, seed=1)
    cache.update(new_k, new_v)
    check_attends_like_the_history(cache, kind, torch.cat([k, new_k], 2), torch.cat([v, new_v], 2))
    cache.update(torch.full_like(k, NAN), torch.full_like(v, NAN))
    cache.reset()
    assert (cache.seq_len, cache.stored_len) == (0, 0)
    cache.update(new_k, new_v)
    assert cache.stored_len == 1
    check_attends_like_the_history(cache, kind, new_k, new_v)
