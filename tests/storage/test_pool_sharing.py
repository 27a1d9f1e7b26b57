"""Sequences of a pool that share blocks and go back, steps that are left undone, and blocks that change hands."""

import copy
import itertools
import random

import pytest
import torch

from kvcache import CacheSpec, InvalidValueError, LayerSpec, OutOfBlocksError
from tests.oracle import assert_close
from tests.storage.pools import (
    FULL,
    MEAN,
    MIXED,
    STORAGES,
    append_layers,
    append_only,
    check_extend,
    check_forward,
    content,
    expected_outputs,
    extend,
    filled,
    held_rows,
    known_queries,
    known_rows,
    mean_forward,
    mean_of_seen,
    new_pool,
    poison,
    whole_content,
)

every_storage = pytest.mark.parametrize("storage", STORAGES)


def test_a_fork_shares_the_past_and_copies_the_open_block_when_it_is_written():
    pool, text = filled(6, spec=FULL, num_blocks=8)
    branch = text.fork()
    assert branch.tokens == text.tokens == [1, 2, 3, 4, 5, 6]
    assert text.blocks() == branch.blocks() == [0, 1]
    assert pool.num_free == {"full": 6}
    assert [pool.num_holders(block) for block in range(3)] == [2, 2, 0]
    check_extend(pool, {text: [17], branch: [18, 19]})
    assert (text.blocks(), branch.blocks()) == ([0, 2], [0, 1])
    assert [pool.num_holders(block) for block in range(4)] == [2, 1, 1, 0]
    assert (text.tokens[6:], branch.tokens[6:]) == ([17], [18, 19])
    check_extend(pool, {branch: [20]})
    check_extend(pool, {text: [21], branch: [22]})


@pytest.mark.parametrize("members", [1, 2, 3, 4])
def test_forks_that_step_together_copy_the_open_block_for_all_but_one_or_for_all(members):
    pool, text = filled(6)
    forks = [text, *(text.fork() for _ in range(3))]
    before = pool.num_free["full"]
    check_extend(pool, {fork: [20 + place] for place, fork in enumerate(forks[:members])})
    assert before - pool.num_free["full"] == members - (members == 4)
    check_extend(pool, {fork: [30 + place] * 2 for place, fork in enumerate(forks)})
    assert len({fork.blocks()[1] for fork in forks}) == 4
    assert {fork.blocks()[0] for fork in forks} == {0}


def test_forks_of_a_full_block_copy_nothing():
    pool, text = filled(8, spec=FULL)
    forks = [text, text.fork(), text.fork()]
    check_extend(pool, {fork: [20 + place] for place, fork in enumerate(forks)})
    assert [fork.blocks() for fork in forks] == [[0, 1, 2], [0, 1, 3], [0, 1, 4]]


def test_a_fork_of_a_fork_and_of_an_empty_sequence():
    pool = new_pool()
    empty = pool.new_sequence()
    first = empty.fork()
    append_only(pool, {first: [1, 2, 3, 4, 5, 6, 7]})
    second = first.fork()
    check_extend(pool, {second: [8]})
    third = second.fork()
    check_extend(pool, {third: [9, 10], first: [11], second: [12], empty: [13]})
    assert third.tokens == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert empty.tokens == [13]


@every_storage
def test_a_fork_is_complete_without_its_parent(storage):  # case F18
    pool, text = filled(14, storage=storage)
    rows = held_rows(text)
    child = text.fork()
    text.free()
    stranger = pool.new_sequence()
    append_only(pool, {stranger: list(range(100, 140))})
    assert held_rows(child) == rows
    pool.check()
    if storage == "float64":
        check_extend(pool, {child: [50, 51], stranger: [52]})
    child.free()
    stranger.free()
    assert pool.num_free == pool.num_blocks


@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
def test_a_window_that_drops_its_first_blocks_leaves_those_of_its_fork(block_size):  # case F18
    pool, text = filled(9, block_size=block_size)
    child = text.fork()
    held = child.blocks("sliding")
    for token in range(20, 40):
        append_only(pool, {text: [token]})
    assert child.blocks("sliding") == held
    assert len(text.blocks("sliding")) <= -(-2 // block_size) + -(-4 // block_size) + 1
    check_extend(pool, {child: [50], text: [51, 52, 53, 54, 55, 56, 57]})
    text.free()
    check_extend(pool, {child: [60, 61, 62]})


def test_window_blocks_that_were_left_are_free_for_others():
    pool, text = filled(4, num_blocks={"full": 40, "sliding": 4})
    for token in range(10, 60):
        append_only(pool, {text: [token]})
        assert len(text.blocks("sliding")) <= 3
        assert text.blocks("sliding")[0] == 0  # the sinks
    assert len(text.blocks("full")) == 14
    check_extend(pool, {text: [60]})


def test_appending_after_a_rollback_into_a_shared_block_copies_it():
    pool, text = filled(8, spec=FULL, num_blocks=3)
    branch = text.fork()
    branch.rollback(1)
    assert branch.blocks() == [0, 1]
    rows = held_rows(text)
    check_extend(pool, {branch: [20]})
    assert (text.blocks(), branch.blocks()) == ([0, 1], [0, 2])
    assert held_rows(text) == rows
    other = text.fork()
    other.rollback(3)
    before = content(pool)
    with pytest.raises(OutOfBlocksError) as caught:
        pool.step([other], [[21]])
    assert (caught.value.kind, caught.value.needed, caught.value.available) == ("full", 1, 0)
    assert content(pool) == before
    text.free()
    branch.free()
    check_extend(pool, {other: [21]})
    assert other.blocks() == [0, 1]


def test_a_prefix_continued_twice_from_forks_stays_as_it_was():  # case C14
    pool, prefix = filled(3)
    rows = held_rows(prefix)
    for ids in ([10, 11, 12], [20, 21]):
        text = prefix.fork()
        check_extend(pool, {text: ids})
        assert (prefix.tokens, held_rows(prefix)) == ([1, 2, 3], rows)
        text.free()
    pool.check()


def test_beams_that_replace_each_other_keep_their_own_history():
    pool, text = filled(6)
    beams, new, rng = [text, text.fork(), text.fork()], itertools.count(100), random.Random(0)
    for _ in range(12):
        check_extend(pool, {beam: [next(new)] for beam in beams})
        chosen = [rng.choice(beams).fork() for _ in beams]
        for beam in beams:
            beam.free()
        beams = chosen
    for beam in beams:
        beam.free()
    assert pool.num_free == pool.num_blocks


def test_two_pools_in_turn_do_not_disturb_each_other():  # case J5
    pools = [new_pool(), new_pool(CacheSpec([LayerSpec(1, 3, window=5)]), block_size=2)]
    texts = [pool.new_sequence() for pool in pools]
    for token in range(1, 15):
        for pool, text in zip(pools, texts, strict=True):
            check_extend(pool, {text: [token, 100 + token]})
    forks = [text.fork() for text in texts]
    texts[0].free()
    check_extend(pools[1], {forks[1]: [200], texts[1]: [201]})
    check_extend(pools[0], {forks[0]: [200]})
    with pytest.raises(InvalidValueError, match=r"^sequences\[0\] belongs to another pool; expected"):
        pools[0].step([texts[1]], [[1]])


@every_storage
def test_a_prompt_that_was_aborted_and_whose_blocks_were_taken_runs_as_if_cold(storage):  # case F14
    prompt = list(range(1, 13))

    def run(pool):
        text, outputs = pool.new_sequence(), []
        for start in (0, 4, 8):
            outputs.append(extend(pool, {text: prompt[start : start + 4]}))
        return text, outputs

    pool = new_pool(num_blocks=4, storage=storage)
    aborted = pool.new_sequence()
    for start in (0, 4):
        extend(pool, {aborted: prompt[start : start + 4]})
    step = pool.step([aborted], [prompt[8:]])
    append_layers(step, 2)
    step.abort()
    aborted.free()
    taker = pool.new_sequence()
    extend(pool, {taker: list(range(100, 115))})
    assert taker.blocks() == [0, 1, 2, 3]
    taker.free()
    poison(pool)
    text, outputs = run(pool)
    cold, expected = run(new_pool(num_blocks=4, storage=storage))
    assert held_rows(text) == held_rows(cold)
    assert all(
        torch.equal(*pair) for chunks in zip(outputs, expected, strict=True) for pair in zip(*chunks, strict=True)
    )
    pool.check()


def test_a_thousand_random_steps_over_six_blocks_see_what_they_must():  # case F23
    rng, pool = random.Random(23), new_pool(MEAN, num_blocks=6, block_size=3)
    poison(pool)
    texts, refused = [], 0
    for _ in range(1000):
        act = rng.random()
        if act < 0.15 or not texts:
            texts.append(rng.choice(texts).fork() if texts and rng.random() < 0.5 else pool.new_sequence())
            continue
        if act < 0.25:
            texts.pop(rng.randrange(len(texts))).free()
            continue
        members = rng.sample(texts, rng.randint(1, min(3, len(texts))))
        counts = [rng.choice([1, 1, 1, 2, 5]) for _ in members]
        try:
            step = pool.step(members, [[0] * count for count in counts])
        except OutOfBlocksError:
            refused += 1
            texts.pop(rng.randrange(len(texts))).free()
            pool.check()
            continue
        means = mean_forward(step)
        for layer, rows in zip(MEAN.layers, means, strict=True):
            for text, count, row in zip(members, counts, rows, strict=True):
                expected = [mean_of_seen(text.seq_len + t, layer) for t in range(count)]
                assert row == pytest.approx(expected, rel=1e-12)
        if rng.random() < 0.2:
            step.abort()
        else:
            step.commit([rng.randint(0, count) for count in counts] if rng.random() < 0.3 else None)
        pool.check()
    assert refused > 50
    for text in texts:
        text.free()
    assert pool.num_free == pool.num_blocks


def test_out_of_blocks_of_the_second_kind_gives_those_of_the_first_back():
    pool = new_pool(num_blocks={"full": 9, "sliding": 3})
    text = pool.new_sequence()
    extend(pool, {text: list(range(1, 7))})
    branch = text.fork()
    before = whole_content(pool)
    for ids in ([[7], [8] * 7], [[7] * 10, [8]]):  # two copies' worth, with and without new blocks
        with pytest.raises(
            OutOfBlocksError, match=r"^blocks of the sliding layers: . needed for the step, 1 available"
        ):
            pool.step([text, branch], ids)
    assert whole_content(pool) == before
    pool.check()
    check_extend(pool, {text: [9], branch: [10]})


def leave_by_exception(step, num_layers):
    with pytest.raises(ZeroDivisionError), step:  # noqa: PT012
        append_layers(step, num_layers)
        raise ZeroDivisionError


def leave_by_interrupt(step, num_layers):
    with pytest.raises(KeyboardInterrupt), step:  # noqa: PT012
        append_layers(step, num_layers)
        raise KeyboardInterrupt


def leave_by_abort(step, num_layers):
    append_layers(step, num_layers)
    step.abort()


def leave_by_abort_inside(step, num_layers):
    with step:
        append_layers(step, num_layers)
        step.abort()


def leave_incomplete(step, num_layers):
    with pytest.raises(InvalidValueError, match=r"^layers \[.*3\] are not appended; expected every layer"), step:
        append_layers(step, min(num_layers, 3))


WAYS_OUT = [leave_by_exception, leave_by_interrupt, leave_by_abort, leave_by_abort_inside, leave_incomplete]


@pytest.mark.parametrize("leave", WAYS_OUT)
@pytest.mark.parametrize("num_layers", [0, 2, 4])
@pytest.mark.parametrize("storage", ["float64", "int4"])
def test_a_step_left_undone_never_happened(leave, num_layers, storage):
    def run(interrupted):
        pool, first, second = filled(6, 13, storage=storage)
        fork = first.fork()
        sequences = [first, pool.new_sequence(), fork, second]
        ids = [[20], [21, 22, 23, 24, 25], [26, 27, 28], [29, 30]]
        if interrupted:
            before = content(pool)
            step = pool.step(sequences, ids)
            leave(step, num_layers)
            assert not step.is_open
            assert content(pool) == before
            pool.check()
        outputs = extend(pool, dict(zip(sequences, ids, strict=True)))
        return content(pool), outputs

    (after, outputs), (expected, expected_outputs) = run(True), run(False)
    assert [rows for _, _, rows in after["sequences"]] == [rows for _, _, rows in expected["sequences"]]
    assert [tokens for tokens, _, _ in after["sequences"]] == [tokens for tokens, _, _ in expected["sequences"]]
    assert after["free"] == expected["free"]
    assert all(torch.equal(one, other) for one, other in zip(outputs, expected_outputs, strict=True))


@pytest.mark.parametrize("order", [1, -1])
def test_an_aborted_step_leaves_the_rows_of_a_longer_fork(order):
    pool, text = filled(6)
    shorter = text.fork()
    shorter.rollback(1)
    before = content(pool)
    step = pool.step([text, shorter][::order], [[7], [8]])
    append_layers(step)
    step.abort()
    pool.check()
    assert content(pool) == before


def test_two_steps_are_open_at_once_and_end_in_any_order():
    pool, first, second = filled(6, 5)
    fork = first.fork()
    one, other = pool.step([first], [[20, 21]]), pool.step([fork, second], [[22], [23]])
    assert pool.open_steps == [one, other]
    step_rows = [known_rows(MIXED, 0, ids) for ids in ([20, 21], [22, 23])]
    other.append(0, *step_rows[1])
    one.append(0, *step_rows[0])
    for step, histories, counts in (
        (one, [[*range(1, 7), 20, 21]], [2]),
        (other, [[*range(1, 7), 22], [*range(7, 12), 23]], [1, 1]),
    ):
        q = known_queries(MIXED, 0, step.tokens[0].tolist())
        assert_close(step.attend(0, q), expected_outputs(MIXED, 0, histories, counts)[0])
    other.abort()
    for layer in range(1, 4):
        one.append(layer, *known_rows(MIXED, layer, [20, 21]))
    one.commit()
    pool.check()
    check_extend(pool, {fork: [24], first: [25], second: [26, 27]})


@every_storage
def test_fifty_rollbacks_and_refills_leave_kept_rows_as_they_were(storage):
    spec = CacheSpec([LayerSpec(2, 4), LayerSpec(3, 33, v_head_dim=6)])
    pool, text = filled(10, spec=spec, storage=storage)
    other, ids = text.fork(), itertools.count(1000)
    kept = text.fork()
    kept.truncate(5)
    expected, whole = held_rows(kept), held_rows(other)
    for turn in range(50):
        text.rollback(turn % 5 + 1)
        append_only(pool, {text: list(itertools.islice(ids, turn % 5 + 1))})
        assert text.seq_len == 10
    assert held_rows(other) == whole
    text.truncate(5)
    assert held_rows(text) == expected
    pool.check()


@every_storage
def test_fifty_rollbacks_of_a_token_leave_the_rows_of_a_window(storage):
    pool, text = filled(13, storage=storage)
    ids, before = itertools.count(1000), None
    for _ in range(50):
        text.rollback(1)
        rows = held_rows(text)
        before = before or rows
        assert rows == before
        append_only(pool, {text: [next(ids)]})
    pool.check()


@pytest.mark.parametrize("keep", [[0, 0, 0], [1, 0, 2], [3, 1, 5], [0, 1, 4], (2, 1, 0)])
def test_only_kept_tokens_become_part_of_a_sequence(keep):  # case I1
    pool, first, second, third = filled(6, 3, 8)
    sequences, tokens = [first, second, third], [[20, 21, 22], [23], [24, 25, 26, 27, 28]]
    before = [sequence.tokens for sequence in sequences]
    with pool.step(sequences, tokens) as step:
        check_forward(step)
        step.commit(keep)
    for sequence, old, new, count in zip(sequences, before, tokens, keep, strict=True):
        assert sequence.tokens == old + new[:count]
        assert len(sequence.blocks()) == -(-sequence.seq_len // 4)
    pool.check()
    check_extend(pool, {first: [30, 31], second: [32], third: [33, 34, 35]})


def test_rejected_drafts_leave_what_plain_steps_leave():  # case I1
    pool, text = filled(6)
    plain, ids = text.fork(), itertools.count(1000)
    for length in range(6, 30):
        right = next(ids)
        extend(pool, {plain: [right]})
        with pool.step([text], [[right, 100, 101]]) as step:
            append_layers(step)
            step.commit(keep=[1])
        assert text.tokens == plain.tokens
        assert text.seq_len == length + 1
        assert len(text.blocks()) == len(plain.blocks())
        assert held_rows(text) == held_rows(plain)
    pool.check()


def test_drafts_over_a_block_border_give_their_block_back():  # case I3
    pool, text = filled(6, spec=MEAN)
    step = pool.step([text], [[20, 21, 22]])
    assert pool.num_free == {"full": 37, "sliding": 37}
    mean_forward(step)
    step.commit(keep=[1])
    assert text.tokens == [1, 2, 3, 4, 5, 6, 20]
    assert text.blocks() == [0, 1]
    assert pool.num_free == {"full": 38, "sliding": 38}
    assert pool.num_holders(2) == 0
    pool.check()


def test_nothing_kept_of_a_first_step_leaves_an_empty_sequence():
    pool = new_pool()
    text = pool.new_sequence()
    with pool.step([text], [[1, 2, 3, 4, 5]]) as step:
        append_layers(step)
        step.commit([0])
    assert (text.seq_len, text.blocks(), text.blocks("sliding")) == (0, [], [])
    assert pool.num_free == pool.num_blocks


def test_a_copied_sequence_is_a_fork_and_a_copied_pool_a_pool_of_its_own():
    pool, text = filled(6)
    twin = copy.copy(text)
    assert (twin.tokens, twin.blocks()) == (text.tokens, text.blocks())
    extend(pool, {text: [7], twin: [8]})
    assert (text.tokens[6:], twin.tokens[6:]) == ([7], [8])
    assert text.blocks() != twin.blocks()
    pool.check()
    for way in (copy.copy, copy.deepcopy):
        other = way(pool)
        other.sequences[0].free()
        other.check()
        assert text.tokens == [1, 2, 3, 4, 5, 6, 7]
        assert pool.num_free != other.num_free
    pool.check()
