import pytest
import torch

from kvcache import InvalidTypeError, InvalidValueError, RollbackError, SlidingWindowCache
from tests.allocations import CountAllocations
from tests.oracle import assert_close, attend_rows, mean_trick
from tests.storage.caches import ENCODED_STORAGES, FLOAT_STORAGES


def window_cache(window, **options):
    return SlidingWindowCache(1, 1, 1, window, torch.float64, **options)


def tag_tokens(first, count):
    """Return K = 0 and V = the tokens' numbers, counted from 1."""
    k, v = mean_trick(first + count)
    return k[:, :, first:], v[:, :, first:]


def stored_tags(cache):
    return cache.state["v"].flatten().tolist()


def ones(count):
    return torch.ones(1, 1, count, 1, dtype=torch.float64)


@pytest.mark.parametrize("window", [1, 2, 3, 5])
def test_tags_come_back_in_order_for_every_prefill_and_step(window):  # case E2
    for prefill in range(2 * window + 1):
        cache = window_cache(window)
        cache.update(*tag_tokens(0, prefill))
        for step in range(1, 2 * window + 1):
            length = prefill + step
            _, seen = cache.update(*tag_tokens(length - 1, 1))
            newest = list(range(max(1, length - window + 1), length + 1))
            assert seen.flatten().tolist() == newest
            assert stored_tags(cache) == newest
            assert cache.positions.tolist() == [tag - 1 for tag in newest]
            assert cache.stored_len == min(length, window)
            assert cache.attend(ones(1)).item() == pytest.approx(sum(newest) / len(newest), rel=1e-12)


def test_a_prompt_longer_than_the_window_stays_causal():  # case E3
    cache = window_cache(4)
    cache.update(*tag_tokens(0, 7))
    assert cache.attend(ones(7)).flatten().tolist() == pytest.approx([1, 1.5, 2, 2.5, 3.5, 4.5, 5.5], rel=1e-12)


@pytest.mark.parametrize("chunk", range(1, 12))
def test_chunked_prefill_equals_one_shot_row_by_row(chunk):  # case E5
    expected = [sum(range(max(1, t - 3), t + 1)) / min(t, 4) for t in range(1, 12)]
    cache, rows = window_cache(4), []
    for start in range(0, 11, chunk):
        count = min(chunk, 11 - start)
        cache.update(*tag_tokens(start, count))
        rows += cache.attend(ones(count)).flatten().tolist()
    assert rows == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("target", "needed"), [(9, [7, 8, 9]), (5, [3, 4, 5])])
def test_rewinding_to_resident_rows_is_allowed(target, needed):  # case E7
    cache = window_cache(4, slack=4)
    for token in range(10):
        cache.update(*tag_tokens(token, 1))
    assert stored_tags(cache) == list(range(3, 11))
    assert cache.can_rollback(10 - target)
    cache.truncate(target)
    cache.update(*tag_tokens(99, 1))
    assert cache.attend(ones(1)).item() == pytest.approx((sum(needed) + 100) / 4, rel=1e-12)


@pytest.mark.parametrize("target", [4, 1])
def test_rewinding_past_resident_rows_is_refused(target):  # case E7
    cache = window_cache(4, slack=4)
    cache.update(*tag_tokens(0, 10))
    assert not cache.can_rollback(10 - target)
    with pytest.raises(RollbackError, match=f"a sequence of {target} tokens needs") as refused:
        cache.truncate(target)
    assert isinstance(refused.value, ValueError)
    assert stored_tags(cache) == list(range(3, 11))


@pytest.mark.parametrize("slack", [0, 1, 3, 8])
@pytest.mark.parametrize("window", [1, 2, 5])
def test_once_full_slack_plus_one_tokens_can_be_rolled_back(window, slack):
    cache = window_cache(window, slack=slack, sinks=1)
    cache.update(*tag_tokens(0, 40))
    for n in range(slack + 2):
        assert cache.can_rollback(n)
    if window > 1:
        assert not cache.can_rollback(slack + 2)


def test_rolling_back_twice_uses_up_the_slack():
    cache = window_cache(3, slack=2)
    cache.update(*tag_tokens(0, 10))
    cache.rollback(2)
    assert stored_tags(cache) == [6, 7, 8]
    assert cache.can_rollback(1)
    assert not cache.can_rollback(2)
    cache.update(*tag_tokens(8, 2))
    assert cache.can_rollback(3)


def test_sinks_and_newest_rows_are_kept():  # case E12
    for chunks in ([8], [1] * 8, [3, 5], [1, 7]):
        cache, start = window_cache(3, sinks=2), 0
        for count in chunks:
            cache.update(*tag_tokens(start, count))
            start += count
        assert stored_tags(cache) == [1, 2, 6, 7, 8]
        assert (cache.stored_len, cache.seq_len - cache.stored_len, cache.seq_len) == (5, 3, 8)
        assert cache.positions.tolist() == [0, 1, 5, 6, 7]


def test_a_long_steps_extra_rows_do_not_count_as_stored():
    cache = window_cache(3, slack=1)
    nbytes = cache.nbytes
    cache.update(*tag_tokens(0, 20))
    assert (cache.stored_len, cache.nbytes) == (4, nbytes)
    assert not cache.can_rollback(3)
    assert cache.attend(ones(20)).flatten()[10].item() == pytest.approx(10.0)  # tokens 9, 10, 11
    cache.rollback(1)
    with pytest.raises(
        InvalidValueError, match=r"last 5 tokens' queries sees tokens from position 12 on; stored are those from 16 on"
    ):
        cache.attend(ones(5))


def test_queries_of_several_steps_need_slack():
    tight, roomy = window_cache(3), window_cache(3, slack=1)
    for token in range(6):
        for cache in (tight, roomy):
            cache.update(*tag_tokens(token, 1))
    assert roomy.attend(ones(2)).flatten().tolist() == pytest.approx([4, 5])
    with pytest.raises(InvalidValueError, match="create the cache with slack >= 1"):
        tight.attend(ones(2))


def test_left_padding_with_sinks_is_exact_or_refused():
    cache = window_cache(3, sinks=2)
    cache.update(*tag_tokens(0, 5))
    assert cache.attend(ones(1), starts=[1]).item() == pytest.approx((2 + 3 + 4 + 5) / 4)
    cache.update(*tag_tokens(5, 3))
    assert cache.attend(ones(1), starts=[0]).item() == pytest.approx((1 + 2 + 6 + 7 + 8) / 5)
    with pytest.raises(InvalidValueError, match="starts holds 1, but the first 2 tokens, kept as sinks, are padding"):
        cache.attend(ones(1), starts=[1])


def test_left_padding_reaches_into_a_wrapped_window():
    cache = SlidingWindowCache(2, 1, 1, 4, torch.float64)
    k, v = (rows.expand(2, -1, -1, -1) for rows in tag_tokens(0, 9))
    cache.update(k[:, :, :6], v[:, :, :6])
    q = torch.ones(2, 1, 6, 1, dtype=torch.float64)
    assert_close(cache.attend(q, starts=[4, 0]), attend_rows(q, k[:, :, :6], v[:, :, :6], starts=[4, 0], window=4)[0])
    cache.update(k[:, :, 6:], v[:, :, 6:])
    q = q[:, :, :3]
    assert_close(cache.attend(q, starts=[8, 0]), attend_rows(q, k, v, starts=[8, 0], window=4)[0])


def test_a_decode_step_costs_the_same_however_long_the_sequence():  # case C12
    allocated = []
    for length in (64, 4096):
        cache = window_cache(16)
        cache.update(*tag_tokens(0, length))
        with CountAllocations() as count:
            cache.update(*tag_tokens(0, 1))
            cache.attend(ones(1))
        allocated.append(count.allocated)
    assert allocated[1] == allocated[0]


@pytest.mark.parametrize("storage", ["float64", *FLOAT_STORAGES, *ENCODED_STORAGES])
def test_append_costs_the_same_however_wide_the_window(storage):  # case C12
    allocated = []
    for window in (16, 4000):
        cache = window_cache(window, storage=storage, slack=2, sinks=1)
        cache.append(*tag_tokens(0, window + 100))
        k, v = ones(1), ones(1)
        with CountAllocations() as count:
            cache.append(k, v)
        allocated.append(count.allocated)
    assert allocated[1] == allocated[0]
    if storage not in ENCODED_STORAGES:
        assert allocated[0] <= cache.token_nbytes


def test_append_keeps_what_the_queries_of_a_long_step_see():  # case E3
    cache = window_cache(4)
    assert cache.append(*tag_tokens(0, 7)) is None
    assert cache.attend(ones(7)).flatten().tolist() == pytest.approx([1, 1.5, 2, 2.5, 3.5, 4.5, 5.5], rel=1e-12)
    assert cache.append(*tag_tokens(7, 1)) is None
    assert cache.attend(ones(1)).item() == pytest.approx(6.5, rel=1e-12)  # 5, 6, 7, 8


def test_resized_gives_other_windows_and_slacks():
    cache = window_cache(3, sinks=1, slack=2)
    cache.append(*tag_tokens(0, 9))
    assert stored_tags(cache) == [1, 5, 6, 7, 8, 9]
    roomier = cache.resized(slack=4)
    assert (roomier.window, roomier.sinks, roomier.slack, roomier.k_cache.shape[2]) == (3, 1, 4, 8)
    assert stored_tags(roomier) == [1, 5, 6, 7, 8, 9]
    roomier.append(*tag_tokens(9, 2))
    assert stored_tags(roomier) == [1, 5, 6, 7, 8, 9, 10, 11]
    tighter = cache.resized(window=2, slack=0)
    assert stored_tags(tighter) == [1, 8, 9]
    assert tighter.attend(ones(1)).item() == pytest.approx((1 + 8 + 9) / 3, rel=1e-12)
    wider = cache.resized(window=5, slack=0)  # tokens 5 to 9 are stored, and 6 to 9 are what the next one sees
    assert stored_tags(wider) == [1, 5, 6, 7, 8, 9]
    wider.append(*tag_tokens(9, 1))
    assert wider.attend(ones(1)).item() == pytest.approx((1 + 6 + 7 + 8 + 9 + 10) / 6, rel=1e-12)
    assert stored_tags(cache) == [1, 5, 6, 7, 8, 9]
    assert (cache.window, cache.slack) == (3, 2)


def test_a_window_that_would_see_dropped_tokens_is_refused():
    cache = window_cache(3)
    cache.append(*tag_tokens(0, 9))
    with pytest.raises(InvalidValueError, match="3 rows; that does not fit seq_len = 9, window = 8"):
        cache.resized(window=8)
    assert stored_tags(cache) == [7, 8, 9]
    fresh = window_cache(3)
    fresh.append(*tag_tokens(0, 3))
    fresh = fresh.resized(window=8)
    fresh.append(*tag_tokens(3, 3))
    assert fresh.attend(ones(1)).item() == pytest.approx(3.5, rel=1e-12)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"window": 0}, InvalidValueError, "window is 0"),
        ({"window": 2.0}, InvalidTypeError, "window is a float"),
        ({"window": 2, "sinks": -1}, InvalidValueError, "sinks is -1"),
        ({"window": 2, "slack": -1}, InvalidValueError, "slack is -1"),
        ({"window": 2, "slack": True}, InvalidTypeError, "slack is a bool"),
    ],
)
def test_bad_sizes_are_named(options, error, message):
    with pytest.raises(error, match=message):
        window_cache(**options)


def test_repr_says_what_it_is():
    assert repr(SlidingWindowCache(1, 2, 4, 8, sinks=1)) == (
        "SlidingWindowCache(batch_size=1, num_heads=2, head_dim=4, window=8, sinks=1, slack=0, dtype=float32, "
        "device=cpu, seq_len=0)"
    )
