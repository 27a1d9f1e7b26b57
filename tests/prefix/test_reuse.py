"""What is found: whole blocks, parts of blocks, and never the last token."""

import copy
import pickle

import pytest
import torch

from kvcache import InvalidTypeError, InvalidValueError
from kvcache.prefix import LookupEnd, PrefixCache
from tests.prefix.runs import kept_blocks, new_cache, run, start
from tests.storage.pools import (
    FULL,
    MEAN,
    append_layers,
    append_only,
    check_extend,
    held_rows,
    mean_forward,
    mean_of_seen,
    poison,
)


@pytest.mark.parametrize(("length", "reused"), [(3, 2), (4, 3), (5, 4), (8, 7), (9, 8)])
def test_f7_a_prompt_that_is_wholly_kept_still_computes_its_last_token(length, reused):
    prefixes = new_cache()
    prompt = list(range(100, 100 + length))
    assert [run(prefixes, prompt) for _ in range(3)] == [0, reused, reused]


@pytest.mark.parametrize(("length", "reused"), [(3, 0), (4, 3), (5, 4), (8, 7), (9, 8)])
def test_f7_whole_blocks_are_found_without_being_published(length, reused):
    prefixes = new_cache()
    prompt = list(range(100, 100 + length))
    for expected in (0, reused, reused):
        sequence, found = start(prefixes, prompt)
        assert found == expected
        sequence.free()
    prefixes.pool.check()


def test_f7_the_chain_still_hits_after_it_was_extended():
    prefixes = new_cache()
    assert run(prefixes, [1, 2, 3, 4]) == 0
    assert run(prefixes, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 4
    assert run(prefixes, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]) == 9
    assert run(prefixes, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]) == 10


def test_d5_the_same_prompt_again_runs_its_last_token_only():
    prefixes = new_cache()
    run(prefixes, [1, 2, 3, 4, 5])
    sequence = prefixes.acquire([1, 2, 3, 4, 5])
    assert sequence.tokens == [1, 2, 3, 4]
    for token in (5, 6, 7, 8):
        check_extend(prefixes.pool, {sequence: [token]})
    assert sequence.tokens == [1, 2, 3, 4, 5, 6, 7, 8]


def test_f19_the_last_token_sampled_is_not_found_as_it_was_never_run():
    prefixes = new_cache()
    sequence, _ = start(prefixes, [1, 2, 3, 4])
    for token in (5, 6):  # 7 is sampled last
        check_extend(prefixes.pool, {sequence: [token]})
    prefixes.publish(sequence)
    sequence.free()
    assert prefixes.acquire([1, 2, 3, 4, 5, 6, 7, 8, 9]).seq_len == 6


def test_a9_only_the_common_beginning_is_reused_whatever_comes_later():
    prefixes = new_cache()
    run(prefixes, list(range(1, 11)))
    assert run(prefixes, [1, 2, 3, 6, 7, 10]) == 3


@pytest.mark.parametrize("common", range(9))
def test_a_look_up_ends_with_the_longest_common_run_within_a_block(common):
    prefixes = new_cache()
    for other in ([1, 2, 3, 4, 50, 60, 70, 80], [1, 2, 30, 40], [1, 2, 3, 4, 5, 6, 70, 8]):
        run(prefixes, other)
    run(prefixes, [1, 2, 3, 4, 5, 6, 7, 8])
    text = [*range(1, common + 1), 99, 98, 97]
    assert run(prefixes, text) == common


def test_an_acquired_sequence_takes_no_block_until_it_writes():
    prefixes = new_cache(spec=FULL, num_blocks=3)
    run(prefixes, [1, 2, 3, 4, 5, 6])
    sequence = prefixes.acquire([1, 2, 3, 4, 5, 6])
    assert (sequence.blocks(), prefixes.pool.num_free) == ([0, 1], {"full": 1})
    check_extend(prefixes.pool, {sequence: [6]})
    assert (sequence.blocks(), prefixes.pool.num_free) == ([0, 2], {"full": 0})


def test_texts_that_were_computed_twice_at_once_share_one_copy_in_the_end():
    prefixes = new_cache(spec=FULL)
    one, other = prefixes.acquire([1, 2, 3, 4, 5]), prefixes.acquire([1, 2, 3, 4, 6])
    check_extend(prefixes.pool, {one: [1, 2, 3, 4, 5], other: [1, 2, 3, 4, 6]})
    assert (one.blocks(), other.blocks()) == ([0, 1], [0, 3])
    assert prefixes.pool.num_free == {"full": 37}
    check_extend(prefixes.pool, {one: [7, 8, 9, 10], other: [7, 8, 9, 10]})


def test_forks_publish_what_is_theirs():
    prefixes = new_cache()
    sequence, _ = start(prefixes, [1, 2, 3, 4, 5, 6])
    branch = sequence.fork()
    check_extend(prefixes.pool, {sequence: [7, 8], branch: [70, 80, 90]})
    prefixes.publish(branch)
    sequence.free()
    branch.free()
    assert prefixes.acquire([1, 2, 3, 4, 5, 6, 7, 8, 9]).seq_len == 8
    assert prefixes.acquire([1, 2, 3, 4, 5, 6, 70, 80, 90, 0]).seq_len == 9


@pytest.mark.parametrize("length", range(10))
def test_what_is_written_anew_behind_a_rollback_is_never_found_as_what_was_there(length):
    prefixes = new_cache(spec=FULL)
    sequence, _ = start(prefixes, list(range(1, 10)))
    prefixes.publish(sequence)
    sequence.rollback(9 - length)
    check_extend(prefixes.pool, {sequence: list(range(20, 35))})
    prefixes.publish(sequence)
    sequence.free()
    assert run(prefixes, [*range(1, 10), 10]) == 9
    assert run(prefixes, [*range(1, 1 + length), *range(20, 35), 0]) == length + 15


def test_a_short_block_that_a_longer_one_covers_is_not_kept_twice():
    prefixes = new_cache(spec=FULL)
    run(prefixes, [1, 2, 3, 4, 5])
    assert len(kept_blocks(prefixes)) == 2
    run(prefixes, [1, 2, 3, 4, 5, 6, 7])
    assert len(kept_blocks(prefixes)) == 2
    run(prefixes, [1, 2, 3, 4, 5, 6])
    assert len(kept_blocks(prefixes)) == 2
    run(prefixes, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert len(kept_blocks(prefixes)) == 3


def test_a_sequence_goes_on_behind_what_it_has_published():
    prefixes = new_cache()
    sequence, _ = start(prefixes, [1, 2, 3, 4, 5, 6])
    assert prefixes.publish(sequence) == 1
    check_extend(prefixes.pool, {sequence: [7]})
    other, reused = start(prefixes, [1, 2, 3, 4, 5, 6, 8])
    assert reused == 6
    check_extend(prefixes.pool, {sequence: [8, 9], other: [9]})


def test_f14_what_an_aborted_prompt_had_computed_is_right_and_the_rest_is_not_found():
    prefixes = new_cache(spec=FULL, num_blocks=4)
    prompt = list(range(1, 13))
    sequence, _ = start(prefixes, prompt[:8])
    step = prefixes.pool.step([sequence], [prompt[8:]])
    append_layers(step)
    step.abort()
    assert prefixes.acquire(prompt, "not this one").seq_len == 0
    sequence.free()
    run(prefixes, list(range(50, 58)))  # takes the two blocks that are left
    assert run(prefixes, prompt) == 8
    prefixes.pool.check()


def test_f14_blocks_that_others_took_meanwhile_are_not_found():
    prefixes = new_cache(spec=FULL, num_blocks=3)
    prompt = list(range(1, 13))
    sequence, _ = start(prefixes, prompt[:8])
    sequence.free()
    run(prefixes, list(range(50, 62)))  # takes all three
    assert run(prefixes, prompt) == 0


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_i3_draft_tokens_that_are_not_accepted_are_never_found(drafts):
    prefixes = new_cache(spec=FULL)
    sequence, _ = start(prefixes, [1, 2, 3, 4, 5, 6])
    step = prefixes.pool.step([sequence], [[7, 8, 9][:drafts]])
    append_layers(step)
    assert prefixes.acquire([1, 2, 3, 4, 5, 6, 7, 8, 9]).seq_len == 4
    step.commit(keep=[1])
    assert prefixes.acquire([1, 2, 3, 4, 5, 6, 7, 8, 9]).seq_len == 4
    prefixes.publish(sequence)
    assert prefixes.acquire([1, 2, 3, 4, 5, 6, 7, 8, 9]).seq_len == 7
    check_extend(prefixes.pool, {sequence: [10]})
    prefixes.pool.check()


def test_f16_all_tokens_are_computed_where_nothing_may_be_reused():
    prefixes = new_cache()
    prompt = list(range(1, 10))
    assert [run(prefixes, prompt, max_reused=0) for _ in range(2)] == [0, 0]
    assert [run(prefixes, prompt, max_reused=most) for most in (1, 4, 7, 8, 99)] == [1, 4, 7, 8, 8]


def test_f18_a_prefix_is_complete_without_the_sequence_that_computed_it():
    prefixes = new_cache(spec=MEAN)
    sequence = prefixes.acquire([1, 2, 3, 4, 5])
    with prefixes.pool.step([sequence], [[1, 2, 3, 4, 5]]) as step:
        mean_forward(step)
    other = prefixes.acquire([1, 2, 3, 4, 5])
    sequence.free()
    with prefixes.pool.step([other], [[5, 6]]) as step:
        means = mean_forward(step)
    expected = [[mean_of_seen(position, layer) for position in (4, 5)] for layer in MEAN.layers]
    assert [of_layer[0] for of_layer in means] == [pytest.approx(row) for row in expected]


def test_poison_in_blocks_that_were_never_written_is_not_read():
    prefixes = new_cache()
    poison(prefixes.pool)
    run(prefixes, [1, 2, 3, 4, 5])
    assert run(prefixes, [1, 2, 3, 4, 5, 6]) == 5


@pytest.mark.parametrize("storage", ["float32", "bfloat16", "int8", "int8/int4"])
def test_encoded_rows_are_shared_as_they_are(storage):
    prefixes = new_cache(spec=FULL, storage=storage)
    pool = prefixes.pool
    for text, reused in (([1, 2, 3, 4, 5, 6], 0), ([1, 2, 3, 4, 5, 6, 7, 8, 9], 6)):
        sequence = prefixes.acquire(text)
        assert sequence.seq_len == reused
        append_only(pool, {sequence: text[reused:]})
        cold = pool.new_sequence()
        append_only(pool, {cold: text})
        assert held_rows(sequence) == held_rows(cold)
        prefixes.publish(sequence)


def test_switched_off_nothing_is_found_or_kept_and_everything_is_right():
    prefixes = new_cache(enabled=False)
    assert [run(prefixes, [1, 2, 3, 4, 5]) for _ in range(2)] == [0, 0]
    assert prefixes.pool.num_free == prefixes.pool.num_blocks
    assert prefixes.lookup([1, 2, 3]).end is LookupEnd.SWITCHED_OFF
    sequence, _ = start(prefixes, [1, 2, 3, 4, 5])
    prefixes.enabled = True
    check_extend(prefixes.pool, {sequence: [6, 7, 8]})  # with weights that nobody looked at before
    assert [run(prefixes, [1, 2, 3, 4, 5, 6, 7, 8, 9]) for _ in range(2)] == [0, 8]
    prefixes.enabled = False
    assert run(prefixes, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 0
    with pytest.raises(InvalidTypeError, match="enabled is a str"):
        prefixes.enabled = "no"


def test_sequences_of_the_pool_itself_are_not_touched():
    prefixes = new_cache()
    sequence = prefixes.pool.new_sequence()
    check_extend(prefixes.pool, {sequence: [1, 2, 3, 4, 5]})
    assert kept_blocks(prefixes) == []
    with pytest.raises(InvalidValueError, match="was not acquired here"):
        prefixes.publish(sequence)


def test_statistics_count_what_steps_have_read():
    prefixes = new_cache(spec=FULL)
    run(prefixes, [1, 2, 3, 4, 5])
    run(prefixes, [1, 2, 3, 4, 5, 6])
    prefixes.acquire([1, 2, 3, 4, 5, 6]).free()  # found, and never read
    shortened = prefixes.acquire([1, 2, 3, 4, 5, 6])
    shortened.rollback(2)
    check_extend(prefixes.pool, {shortened: [9]})
    check_extend(prefixes.pool, {shortened: [9]})
    statistics = prefixes.statistics
    assert (statistics.num_lookups, statistics.num_hits) == (4, 2)
    assert (statistics.num_tokens, statistics.num_reused) == (5 + 6 + 6 + 6, 5 + 3)
    assert (statistics.num_published, statistics.num_kept, statistics.num_evicted) == (4, {"full": 3}, {"full": 0})
    assert statistics.ends == {LookupEnd.NOTHING_KEPT: 1, LookupEnd.WHOLE: 3}
    prefixes.acquire([7, 7])
    assert prefixes.statistics.ends[LookupEnd.NOT_KEPT] == 1
    assert "8 of 25 tokens reused" in repr(prefixes)


def test_a_look_up_alone_holds_and_counts_nothing():
    prefixes = new_cache(spec=FULL)
    run(prefixes, [1, 2, 3, 4, 5])
    before = prefixes.statistics
    found = prefixes.lookup([1, 2, 3, 4, 6])
    assert (found.num_tokens, found.end) == (4, LookupEnd.WHOLE)
    assert prefixes.lookup([1, 2, 9, 9, 9]).end is LookupEnd.NOT_KEPT
    assert prefixes.statistics == before
    assert prefixes.pool.num_available == {"full": 40}


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ([], InvalidValueError, "tokens is empty; expected at least one token id"),
        ([1, -2], InvalidValueError, r"tokens\[1\] is -2; expected a token id >= 0"),
        ([1, 2.0], InvalidTypeError, r"tokens\[1\] is a float \(2.0\); expected an integer token id"),
        ([1, True], InvalidTypeError, r"tokens\[1\] is a bool"),
        ("12", InvalidTypeError, "tokens is a str; expected a list of token ids"),
        ({"input_ids": [1]}, InvalidTypeError, "tokens is a dict; expected a list of token ids, such as its input_ids"),
        (torch.tensor([1.0]), InvalidTypeError, "tokens"),
        (torch.tensor([[1]]), InvalidValueError, "tokens"),
        ([2**63], InvalidValueError, r"tokens\[0\] is 9223372036854775808"),
        (None, InvalidTypeError, "tokens is a NoneType"),
    ],
)
def test_ids_that_are_none_are_refused(tokens, error, message):
    prefixes = new_cache()
    for act in (prefixes.acquire, prefixes.lookup, prefixes.keys):
        with pytest.raises(error, match=message):
            act(tokens)
    assert (prefixes.pool.sequences, prefixes.statistics.num_lookups) == ([], 0)


def test_tokens_may_be_any_integers():
    prefixes = new_cache(spec=FULL)
    run(prefixes, [1, 2, 3, 4, 5])
    for tokens in (torch.tensor([1, 2, 3, 4, 5]), range(1, 6), (1, 2, 3, 4, 5), torch.arange(1, 6, dtype=torch.int32)):
        assert prefixes.lookup(tokens).num_tokens == 4


def test_a_sequence_with_tokens_that_are_not_committed_is_not_published():
    prefixes = new_cache()
    sequence, _ = start(prefixes, [1, 2, 3])
    with prefixes.pool.step([sequence], [[4, 5]]) as step:
        append_layers(step)
        with pytest.raises(InvalidValueError, match="is in an open step; commit or abort that first"):
            prefixes.publish(sequence)
        assert kept_blocks(prefixes) == []
    sequence.free()
    with pytest.raises(InvalidValueError, match="was freed"):
        prefixes.publish(sequence)
    with pytest.raises(InvalidTypeError, match="sequence is a list; expected a Sequence"):
        prefixes.publish([1, 2])


def test_wrong_arguments_are_named():
    prefixes = new_cache()
    with pytest.raises(InvalidValueError, match="has a PrefixCache already"):
        PrefixCache(prefixes.pool)
    with pytest.raises(InvalidTypeError, match="pool is a int; expected a BlockPool"):
        PrefixCache(3)
    with pytest.raises(InvalidTypeError, match="policy is a str; expected a function"):
        new_cache(policy="lru")
    with pytest.raises(InvalidTypeError, match="enabled is a int"):
        new_cache(enabled=1)
    with pytest.raises(InvalidTypeError, match="model"):
        new_cache(model="smollm2")
    with pytest.raises(InvalidValueError, match="max_reused is -1"):
        prefixes.acquire([1], max_reused=-1)
    with pytest.raises(InvalidValueError, match="kind is 'chunked'"):
        prefixes.evict(1, "chunked")
    with pytest.raises(InvalidValueError, match="num_blocks is -1"):
        prefixes.evict(-1)


def test_a_pool_with_a_prefix_cache_is_not_copied():
    prefixes = new_cache()
    for act in (copy.copy, copy.deepcopy, pickle.dumps):
        for what in (prefixes, prefixes.pool):
            with pytest.raises(InvalidTypeError, match="cannot be copied or pickled"):
                act(what)
