"""Which blocks go when room is needed, to the id, and in which order."""

import pytest

from kvcache import OutOfBlocksError
from kvcache.prefix import first_in_first_out, least_recently_used
from tests.prefix.runs import kept_blocks, new_cache, run, start
from tests.storage.pools import FULL, MIXED, append_only, check_extend, extend, whole_content

A, B, C = range(10, 20), range(20, 30), range(30, 40)  # three blocks of 4 each, the last one short


def evicted(prefixes, num_blocks=1, kind=None):
    """Evict blocks one by one; return their ids in order."""
    order = []
    for _ in range(num_blocks):
        before = kept_blocks(prefixes, kind or "full")
        assert prefixes.evict(1, kind) == 1
        order += sorted({*before} - {*kept_blocks(prefixes, kind or "full")})
        prefixes.pool.check()
    return order


def test_the_schedule_of_the_docs():
    """One run after the other over 8 blocks of 4 tokens; blocks are handed out from 0 up, freed ones first."""
    prefixes = new_cache(spec=FULL, num_blocks=8)
    pool = prefixes.pool
    one, reused = start(prefixes, [*range(1, 9), 10, 11])  # blocks 0, 1 whole, 2 with two tokens
    assert (one.blocks(), reused, kept_blocks(prefixes)) == ([0, 1, 2], 0, [0, 1])
    two, reused = start(prefixes, [*range(1, 9), 20, 21, 22, 23, 24])  # shares 0, 1
    assert (two.blocks(), reused, kept_blocks(prefixes)) == ([0, 1, 3, 4], 8, [0, 1, 3])
    prefixes.publish(one)
    one.free()
    assert (kept_blocks(prefixes), pool.num_free, pool.num_available) == ([0, 1, 2, 3], {"full": 3}, {"full": 4})
    two.free()  # its short block was not published, and is free
    assert (kept_blocks(prefixes), pool.num_free, pool.num_available) == ([0, 1, 2, 3], {"full": 4}, {"full": 8})
    three, reused = start(prefixes, [*range(1, 9), 10, 30])  # shares 0, 1, and one token of 2, of which it takes a copy
    assert (three.blocks(), reused, kept_blocks(prefixes)) == ([0, 1, 4], 9, [0, 1, 2, 3])
    # 5 blocks: 3 are free, then block 3 goes, unused for the longest, then 2; the last freed goes out first.
    four, reused = start(prefixes, range(50, 70))
    assert (four.blocks(), reused, kept_blocks(prefixes)) == ([2, 3, 5, 6, 7], 0, [0, 1, 2, 3, 5, 6, 7])
    assert prefixes.lookup([*range(1, 9), 10, 11, 0]).num_tokens == 8
    assert prefixes.statistics.num_evicted == {"full": 2}
    with pytest.raises(OutOfBlocksError, match="1 needed for the step, 0 available"):
        pool.step([four], [[70]])
    three.free()
    check_extend(pool, {four: [70]})
    assert (four.blocks(), kept_blocks(prefixes)) == ([2, 3, 5, 6, 7, 4], [0, 1, 2, 3, 5, 6, 7])
    four.free()
    assert evicted(prefixes, 7) == [1, 0, 7, 6, 5, 3, 2]
    assert (prefixes.evict(1), pool.num_free) == (0, {"full": 8})


def test_the_least_recently_used_goes_first_and_leaves_before_their_parents():
    prefixes = new_cache(spec=FULL)
    for text in (A, B, C):
        run(prefixes, text)
    run(prefixes, [*A[:8], 0])  # uses the first two of A again
    assert kept_blocks(prefixes) == list(range(10))
    assert evicted(prefixes, 10) == [2, 5, 4, 3, 8, 7, 6, 9, 1, 0]


def test_policies_differ_in_what_was_used_again():
    order = {}
    for policy in (least_recently_used, first_in_first_out):
        prefixes = new_cache(spec=FULL, policy=policy)
        for text in (A[:4], B[:4], A[:4], C[:4]):
            run(prefixes, [*text, 0])  # a short block with 0 behind each
        order[policy] = evicted(prefixes, 6)
    assert order[least_recently_used] == [3, 2, 1, 0, 5, 4]
    assert order[first_in_first_out] == [1, 0, 3, 2, 5, 4]


def test_a_policy_of_ones_own_is_a_function_of_a_kept_block():
    prefixes = new_cache(spec=FULL, policy=lambda kept: -kept.node.stop)  # the deepest first
    for text in (A[:4], B, C[:8]):
        run(prefixes, text)
    assert evicted(prefixes, 6) == [3, 5, 2, 0, 4, 1]


def test_blocks_in_use_stay_and_a_hit_holds_what_it_found():
    prefixes = new_cache(spec=FULL, num_blocks=4)
    run(prefixes, A)
    found = prefixes.acquire([*A, 0])
    assert (prefixes.evict(9), kept_blocks(prefixes)) == (0, [0, 1, 2])
    other = prefixes.pool.new_sequence()
    check_extend(prefixes.pool, {other: [1, 2, 3, 4]})
    with pytest.raises(OutOfBlocksError):
        prefixes.pool.step([other], [[5]])
    other.free()
    check_extend(prefixes.pool, {found: [0]})


def test_a_step_that_does_not_fit_evicts_nothing():
    prefixes = new_cache(spec=MIXED, num_blocks={"full": 12, "sliding": 5})
    run(prefixes, A)
    sequence = prefixes.pool.new_sequence()
    before = whole_content(prefixes.pool), prefixes.statistics.num_kept
    with pytest.raises(OutOfBlocksError, match="blocks of the sliding layers: 6 needed for the step, 5 available"):
        prefixes.pool.step([sequence], [range(24)])
    assert (whole_content(prefixes.pool), prefixes.statistics.num_kept) == before
    prefixes.pool.check()


@pytest.mark.parametrize("spec", [FULL, MIXED])
def test_a_pool_never_runs_out_while_something_can_go(spec):
    prefixes = new_cache(spec=spec, num_blocks=5)
    for first in range(0, 400, 20):
        assert run(prefixes, range(first, first + 20)) == 0
        assert run(prefixes, [*range(first, first + 16), 0]) == 16
    assert prefixes.pool.num_available == prefixes.pool.num_blocks


def test_a_recycled_block_is_not_found_as_what_it_held():  # F9
    prefixes = new_cache(spec=FULL, num_blocks=1)
    run(prefixes, [1, 2, 3, 4])
    assert run(prefixes, [5, 6, 7, 8]) == 0
    assert prefixes.lookup([1, 2, 3, 4, 5]).num_tokens == 0
    assert prefixes.lookup([5, 6, 7, 8, 9]).num_tokens == 4


def test_a_block_that_came_back_into_use_is_passed_over():
    prefixes = new_cache(spec=FULL)
    for text in (A[:4], B[:4], C[:4]):
        run(prefixes, text)
    held = prefixes.acquire([*A[:4], 0])
    assert evicted(prefixes, 2) == [1, 2]
    assert prefixes.evict(1) == 0
    held.free()
    assert evicted(prefixes, 1) == [0]


def test_using_the_same_texts_over_and_over_keeps_the_books_small():
    prefixes = new_cache(spec=FULL)
    run(prefixes, A)
    for _ in range(500):
        prefixes.acquire(A).free()
    queue = prefixes._tree.queues["full"]
    assert len(queue._heap) <= 2 * len(queue.blocks) + 64
    assert evicted(prefixes, 3) == [2, 1, 0]


def test_forks_and_open_blocks_next_to_kept_ones():
    prefixes = new_cache(spec=FULL, num_blocks=6)
    sequence, _ = start(prefixes, A)
    prefixes.publish(sequence)
    forks = [sequence.fork() for _ in range(2)]
    extend(prefixes.pool, {fork: [100 + index] for index, fork in enumerate(forks)})
    sequence.free()
    prefixes.pool.check()
    assert [fork.blocks() for fork in forks] == [[0, 1, 3], [0, 1, 4]]
    assert evicted(prefixes, 1) == [2]  # the short one, that nobody uses any more
    append_only(prefixes.pool, {forks[0]: [7]})
    assert prefixes.evict(9) == 0


def test_a_block_can_go_though_a_fork_with_a_copy_of_its_own_uses_the_next_one():
    prefixes = new_cache(spec=FULL, num_blocks=4)
    pool = prefixes.pool
    sequence, _ = start(prefixes, [1, 2, 3, 4, 5])
    fork = sequence.fork()
    prefixes.invalidate()
    run(prefixes, [1, 2, 3, 4, 9])
    sequence.lineage, fork.lineage = (prefixes.acquire([1]).lineage for _ in range(2))  # as if it had run meanwhile
    prefixes.publish(sequence)  # which now uses block 2; the fork has block 0 with the same tokens, and block 1 with it
    assert (sequence.blocks(), fork.blocks()) == ([2, 1], [0, 1])
    sequence.free()
    assert (pool.num_free, pool.num_available) == ({"full": 0}, {"full": 2})
    other, _ = start(prefixes, range(50, 58))
    assert other.blocks() == [2, 3]
    check_extend(pool, {fork: [6, 7]})


@pytest.mark.parametrize("policy", [lambda kept: 1 / 0, lambda kept: None if kept.block else 1])
def test_a_policy_that_fails_leaves_the_books_right(policy):
    prefixes = new_cache(spec=FULL, num_blocks=4, policy=policy)
    pool = prefixes.pool
    run(prefixes, A)
    text = pool.new_sequence()
    for _ in range(2):
        with pytest.raises((ZeroDivisionError, TypeError)):
            pool.step([text], [range(50, 62)])
        pool.check()
    check_extend(pool, {text: [50, 51]})
    text.free()
    pool.check()


def test_what_is_long_gone_from_windows_is_looked_up_in_one_pass():
    calls = []
    prefixes = new_cache(spec=MIXED, num_blocks={"full": 600, "sliding": 600})
    sequence = prefixes.acquire(range(2001))
    append_only(prefixes.pool, {sequence: list(range(2000))})
    sequence.free()
    prefixes.evict(600, "sliding")
    queue = prefixes._tree.queues["full"]
    for kept in queue.blocks.values():
        kept.node.kept = CountedReads(kept.node.kept, calls)
    assert prefixes.lookup(range(2001)).num_tokens == 0
    assert len(calls) < 3 * 500


class CountedReads(dict):
    def __init__(self, content, calls):
        super().__init__(content)
        self.calls = calls

    def __contains__(self, key):
        self.calls.append(key)
        return super().__contains__(key)
