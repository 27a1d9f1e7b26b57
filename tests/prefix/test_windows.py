"""Prefixes of models with windows: a hit goes as far as every kind of layers has what the next token sees."""

import pytest

from kvcache import CacheSpec, LayerSpec
from kvcache.prefix import LookupEnd
from tests.prefix.runs import kept_blocks, new_cache, nodes, run, start
from tests.storage.pools import MIXED, check_extend

WINDOW = CacheSpec([LayerSpec(num_heads=2, head_dim=4, window=6)])
HYBRID = CacheSpec([LayerSpec(num_heads=2, head_dim=4), LayerSpec(num_heads=1, head_dim=6, window=6)])
TEXT = list(range(1, 31))
SPECS = {"window alone": WINDOW, "hybrid": HYBRID, "hybrid with sinks": MIXED}


@pytest.fixture(params=SPECS.values(), ids=SPECS)
def spec(request):
    return request.param


@pytest.mark.parametrize("chunk", [None, 1, 7])
@pytest.mark.parametrize("common", [0, 1, 3, 4, 5, 8, 11, 16, 29, 30])
def test_a_beginning_of_any_length_is_found_though_windows_left_it(spec, common, chunk):
    prefixes = new_cache(spec=spec)
    run(prefixes, TEXT, chunk=chunk)
    assert run(prefixes, [*TEXT[:common], 90, 91, 92, 93, 94], chunk=chunk) == common


def test_blocks_that_a_window_leaves_are_kept_and_go_before_those_in_use():
    prefixes = new_cache(spec=HYBRID, num_blocks={"full": 40, "sliding": 8})
    sequence, _ = start(prefixes, TEXT[:28], chunk=4)
    assert sequence.blocks("sliding") == [5, 6]  # positions 20 to 27
    assert kept_blocks(prefixes, "sliding") == list(range(7))
    assert prefixes.pool.num_available["sliding"] == 6
    check_extend(prefixes.pool, {sequence: TEXT[28:]})
    assert prefixes.evict(3, "sliding") == 3
    assert kept_blocks(prefixes, "sliding") == [3, 4, 5, 6]
    check_extend(prefixes.pool, {sequence: list(range(40, 50))})


def test_a_hit_ends_where_a_window_has_lost_its_rows():
    prefixes = new_cache(spec=HYBRID)
    run(prefixes, TEXT[:28], chunk=4)
    assert prefixes.lookup([*TEXT[:28], 0]).num_tokens == 28
    prefixes.evict(1, "sliding")  # the block of positions 0 to 3, which the window left first
    for common, reused in [(4, 0), (5, 0), (8, 0), (9, 9), (10, 10), (12, 12), (28, 28)]:
        # the token at position 8 sees 3, the one at 9 does not
        found = prefixes.lookup([*TEXT[:common], 90, 91])
        end = LookupEnd.WINDOW if reused < common else LookupEnd.NOT_KEPT
        assert (found.num_tokens, found.end) == (reused, end)
    prefixes.evict(2, "sliding")
    assert prefixes.lookup([*TEXT[:16], 90]).num_tokens == 0
    assert prefixes.lookup([*TEXT[:17], 90, 91]).num_tokens == 17
    assert run(prefixes, [*TEXT[:17], 90, 91]) == 17


def test_sinks_are_needed_as_the_window_is():
    prefixes = new_cache(spec=MIXED)  # window 4, sinks 2
    run(prefixes, TEXT, chunk=4)
    sequence = prefixes.acquire([*TEXT, 0])
    assert (sequence.seq_len, len(sequence.blocks("sliding"))) == (30, 3)  # of positions 0 to 3 and 24 to 29
    check_extend(prefixes.pool, {sequence: [0, 1, 2]})


def test_a_hit_without_the_sinks_ends_before_them():
    prefixes = new_cache(spec=MIXED)
    run(prefixes, TEXT, chunk=4)
    prefixes.evict(7, "sliding")  # all but the block of the sinks, which no window leaves
    found = prefixes.lookup([*TEXT, 0])
    assert (found.num_tokens, found.end) == (4, LookupEnd.WINDOW)
    prefixes.evict(1, "sliding")
    found = prefixes.lookup([*TEXT, 0])
    assert (found.num_tokens, found.end) == (0, LookupEnd.WINDOW)
    assert run(prefixes, [*TEXT, 0]) == 0
    assert run(prefixes, [*TEXT, 0]) == 30


def test_window_blocks_that_went_come_back_when_the_text_runs_again():
    prefixes = new_cache(spec=HYBRID)
    run(prefixes, TEXT)
    prefixes.evict(40, "sliding")
    assert kept_blocks(prefixes, "sliding") == []
    full = kept_blocks(prefixes)
    assert run(prefixes, TEXT) == 0
    assert kept_blocks(prefixes) == full
    assert run(prefixes, TEXT) == 29


def test_a_window_alone_forgets_texts_as_its_blocks_go():
    prefixes = new_cache(spec=WINDOW, num_blocks=6)
    for first in range(0, 500, 50):
        run(prefixes, range(first, first + 30), chunk=4)
    assert len(nodes(prefixes)) < 20
    prefixes.evict(6)
    assert (len(nodes(prefixes)), len(prefixes._roots)) == (0, 0)


def test_a_running_text_whose_window_blocks_all_went_is_published_again():
    prefixes = new_cache(spec=WINDOW)
    sequence, _ = start(prefixes, TEXT[:20], chunk=4)
    other, _ = start(prefixes, TEXT[:20], chunk=4)
    for text in (sequence, other):
        check_extend(prefixes.pool, {text: [50, 51, 52]})
    prefixes.evict(40)
    for text in (sequence, other):
        check_extend(prefixes.pool, {text: [53, 54, 55, 56, 57, 58]})
    prefixes.publish(sequence)
    assert run(prefixes, [*TEXT[:20], *range(50, 59), 0]) == 29
    prefixes.pool.check()


def test_a_sequence_that_was_found_behind_a_window_goes_back_as_far_as_its_rows():
    prefixes = new_cache(spec=HYBRID)
    run(prefixes, TEXT)
    sequence = prefixes.acquire(TEXT)
    assert sequence.blocks("sliding") == [6, 7]  # positions 24 on: what the tokens at 29 and above see
    assert [n for n in range(30) if sequence.can_rollback(n)] == [0, 29]
    sequence.rollback(29)
    check_extend(prefixes.pool, {sequence: [70, 71, 72]})


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 7])
def test_every_window_over_every_block_size(window, block_size):
    spec = CacheSpec([LayerSpec(1, 2), LayerSpec(1, 2, window=window, sinks=window // 3)])
    prefixes = new_cache(spec=spec, num_blocks=120, block_size=block_size)
    run(prefixes, TEXT[:20], chunk=3)
    for common in range(21):
        assert run(prefixes, [*TEXT[:common], 90 + common, 91, 92]) == common
