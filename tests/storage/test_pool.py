"""A pool and its sequences: what they are made from, what they refuse, and that `check` finds what is wrong."""

import contextlib
from array import array

import pytest
import torch

from kvcache import BlockPool, CacheSpec, InvalidTypeError, InvalidValueError, LayerSpec, RollbackError
from tests.storage import pools
from tests.storage.pools import FULL, MIXED, append_layers, append_only, check_extend, content, new_pool

SLIDING = CacheSpec([LayerSpec(2, 4, window=4)])


def filled(length, **options):
    """Return a pool of 8 blocks of each kind, and a sequence in it of the tokens from 1 to `length`."""
    return pools.filled(length, **{"num_blocks": 8, **options})


def test_a_new_pool_is_as_it_was_asked_for():
    pool = BlockPool(MIXED, {"full": 8, "sliding": 5}, block_size=4, storage="int8/int4")
    assert pool.spec is MIXED
    assert pool.block_size == 4
    assert pool.device == torch.device("cpu")
    assert pool.storage == "int8/int4"
    assert pool.num_blocks == pool.num_free == {"full": 8, "sliding": 5}
    assert pool.sequences == pool.open_steps == []
    assert [store.k.shape[:3] for store in pool.stores] == [(8, 2, 4), (5, 1, 4), (8, 4, 4), (5, 2, 4)]
    assert not any(data.any() for store in pool.stores for data in (store.k, store.v))
    pool.check()


@pytest.mark.parametrize(
    ("storage", "name"),
    [
        (torch.bfloat16, "bfloat16"),
        ("int4", "int4"),
        (("int8", torch.float16), "int8/float16"),
        ("int8/int8", "int8"),
        (["float32"], "float32"),
    ],
)
def test_storage_is_named_for_keys_and_values(storage, name):
    assert new_pool(storage=storage).storage == name


def test_one_number_of_blocks_counts_for_each_kind():
    assert new_pool(num_blocks=7).num_blocks == {"full": 7, "sliding": 7}
    assert new_pool(FULL, num_blocks={"full": 7}).num_blocks == {"full": 7}
    assert new_pool(SLIDING, num_blocks=7).num_blocks == {"sliding": 7}


def test_repr_says_how_full_it_is():
    pool, sequence = filled(6)
    assert repr(pool) == (
        "BlockPool(4 layers, block_size=4, storage=float64, device=cpu, 2 of 8 full blocks used, "
        "2 of 8 sliding blocks used, 1 sequences)"
    )
    assert repr(sequence) == "Sequence(seq_len=6, blocks: full=[0, 1], sliding=[0, 1])"
    sequence.free()
    assert repr(sequence) == "Sequence(freed)"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"spec": None}, InvalidTypeError, "spec is a NoneType; expected a CacheSpec"),
        ({"spec": [LayerSpec(1, 1)]}, InvalidTypeError, "spec is a list; expected a CacheSpec"),
        ({"num_blocks": 0}, InvalidValueError, "num_blocks is 0; expected an integer >= 1"),
        ({"num_blocks": -1}, InvalidValueError, "num_blocks is -1; expected an integer >= 1"),
        ({"num_blocks": 4.0}, InvalidTypeError, r"num_blocks is a float \(4.0\); expected an integer >= 1"),
        ({"num_blocks": True}, InvalidTypeError, "num_blocks is a bool"),
        ({"num_blocks": None}, InvalidTypeError, "num_blocks is a NoneType"),
        ({"num_blocks": {}}, InvalidValueError, r"num_blocks has the kinds \[\]; expected \['full', 'sliding'\]"),
        ({"num_blocks": {"full": 4}}, InvalidValueError, r"num_blocks has the kinds \['full'\]; expected \['full', "),
        (
            {"num_blocks": {"full": 4, "sliding": 4, "linear": 4}},
            InvalidValueError,
            r"num_blocks has the kinds \['full', 'sliding', 'linear'\]; expected",
        ),
        ({"num_blocks": {"full": 4, "sliding": 0}}, InvalidValueError, r"num_blocks\['sliding'\] is 0; expected"),
        ({"num_blocks": {"full": 4.0, "sliding": 1}}, InvalidTypeError, r"num_blocks\['full'\] is a float"),
        ({"block_size": 0}, InvalidValueError, "block_size is 0; expected an integer >= 1"),
        ({"block_size": "4"}, InvalidTypeError, "block_size is a str"),
        (
            {"storage": "int3"},
            InvalidValueError,
            "storage is 'int3'; expected one of float16, bfloat16, .*int4, or two",
        ),
        ({"storage": "int8/int4/int4"}, InvalidValueError, "storage is 'int8/int4/int4'; expected one entry, or"),
        ({"storage": torch.int16}, InvalidValueError, r"storage is torch\.int16; expected one of"),
        ({"storage": 8}, InvalidTypeError, "storage is 8; expected one of"),
        ({"device": "nonsense"}, InvalidValueError, "device is 'nonsense'; expected a device that torch can use here"),
        ({"device": "cpu:x"}, InvalidValueError, "device is 'cpu:x'; expected a device"),
    ],
)
def test_a_pool_cannot_be_made_from(arguments, error, message):
    with pytest.raises(error, match=f"^{message}"):
        BlockPool(**{"spec": MIXED, "num_blocks": 4, "block_size": 4, **arguments})


def test_a_new_sequence_is_empty_and_holds_nothing():
    pool = new_pool()
    sequence = pool.new_sequence()
    assert (sequence.seq_len, sequence.tokens, sequence.is_freed) == (0, [], False)
    assert sequence.blocks() == sequence.blocks("sliding") == []
    assert pool.sequences == [sequence]
    sequence.rollback(0)
    sequence.truncate(0)
    assert sequence.can_rollback(0)
    assert not sequence.can_rollback(1)
    sequence.free()
    assert pool.sequences == []
    pool.check()


def test_twelve_tokens_hold_three_blocks_and_none_once_freed():  # case F9
    pool, sequence = filled(12, spec=FULL)
    assert sequence.blocks() == [0, 1, 2]
    assert [pool.num_holders(block) for block in range(4)] == [1, 1, 1, 0]
    assert pool.num_free == {"full": 5}
    sequence.free()
    assert [pool.num_holders(block) for block in range(4)] == [0, 0, 0, 0]
    assert pool.num_free == {"full": 8}


def test_what_a_sequence_tells_is_a_snapshot():
    pool, sequence = filled(6)
    tokens, blocks, sequences, free = sequence.tokens, sequence.blocks(), pool.sequences, pool.num_free
    append_only(pool, {sequence: [7, 8, 9]})
    pool.new_sequence()
    assert (tokens, blocks, len(sequences), free) == ([1, 2, 3, 4, 5, 6], [0, 1], 1, {"full": 6, "sliding": 6})
    for told in (tokens, blocks, sequences):
        told.clear()
    assert (sequence.seq_len, sequence.blocks(), len(pool.sequences)) == (9, [0, 1, 2], 2)


@pytest.mark.parametrize("n", range(7))
def test_rolling_back_drops_the_last_tokens_and_the_blocks_behind_them(n):  # case D3
    pool, sequence = filled(6, spec=FULL)
    assert sequence.can_rollback(n)
    sequence.rollback(n)
    assert sequence.tokens == list(range(1, 7 - n))
    assert sequence.blocks() == [[], [0], [0], [0], [0], [0, 1], [0, 1]][6 - n]
    check_extend(pool, {sequence: [100, 101, 102]})


@pytest.mark.parametrize("length", range(7))
def test_truncating_keeps_the_first_tokens(length):  # case D3
    pool, sequence = filled(6, spec=FULL)
    sequence.truncate(length)
    assert sequence.tokens == list(range(1, length + 1))
    check_extend(pool, {sequence: [100]})


def test_layers_of_every_kind_go_back_together():  # case G5
    pool, sequence = filled(9, storage="int8/int4")
    sequence.rollback(1)
    assert (sequence.blocks("full"), sequence.blocks("sliding")) == ([0, 1], [0, 1])
    append_only(pool, {sequence: [100]})
    assert (len(sequence.blocks("full")), len(sequence.blocks("sliding"))) == (3, 3)
    pool.check()


def test_a_window_goes_back_as_far_as_it_holds_what_the_rest_needs():
    pool, sequence = filled(13)  # sliding: the sinks' block, and positions 8 .. 12; window 4
    assert [n for n in range(14) if sequence.can_rollback(n)] == [0, 1, 2, 9, 10, 11, 12, 13]
    before = content(pool)
    for n in range(3, 9):
        with pytest.raises(
            RollbackError, match=f"^the last {n} of 13 tokens cannot be dropped: .* a sequence of {13 - n} "
        ):
            sequence.rollback(n)
        with pytest.raises(RollbackError, match="fork the sequence before tokens that may have to go, or commit only"):
            sequence.truncate(13 - n)
    assert content(pool) == before
    sequence.rollback(9)
    check_extend(pool, {sequence: [100, 101]})


def test_right_after_a_step_a_window_can_drop_a_token_and_then_what_it_still_holds():
    pool, sequence = filled(13, num_blocks=13, block_size=1)
    assert sequence.can_rollback(1)
    sequence.rollback(1)
    assert not sequence.can_rollback(1)
    with pytest.raises(RollbackError):
        sequence.rollback(1)
    check_extend(pool, {sequence: [100]})
    assert sequence.can_rollback(1)


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda sequence: sequence.rollback(7), InvalidValueError, "n is 7; expected at most seq_len = 6"),
        (lambda sequence: sequence.rollback(-1), InvalidValueError, "n is -1; expected an integer >= 0"),
        (lambda sequence: sequence.rollback(1.0), InvalidTypeError, "n is a float"),
        (lambda sequence: sequence.rollback(True), InvalidTypeError, "n is a bool"),
        (lambda sequence: sequence.rollback(None), InvalidTypeError, "n is a NoneType"),
        (lambda sequence: sequence.can_rollback(-1), InvalidValueError, "n is -1; expected an integer >= 0"),
        (lambda sequence: sequence.can_rollback("1"), InvalidTypeError, "n is a str"),
        (lambda sequence: sequence.truncate(7), InvalidValueError, "length is 7; expected at most seq_len = 6"),
        (lambda sequence: sequence.truncate(-1), InvalidValueError, "length is -1; expected an integer >= 0"),
        (lambda sequence: sequence.truncate("3"), InvalidTypeError, "length is a str"),
        (
            lambda sequence: sequence.blocks("nonsense"),
            InvalidValueError,
            r"kind is 'nonsense'; expected one of \['full', ",
        ),
        (lambda sequence: sequence.blocks(None), InvalidValueError, "kind is None; expected one of"),
    ],
)
def test_a_sequence_refuses_and_stays_as_it_was(act, error, message):  # case D3
    pool, sequence = filled(6)
    before = content(pool)
    with pytest.raises(error, match=f"^{message}"):
        act(sequence)
    assert content(pool) == before
    pool.check()


def test_without_full_layers_the_kind_must_be_named():
    _, sequence = filled(3, spec=SLIDING)
    assert sequence.blocks("sliding") == [0]
    with pytest.raises(InvalidValueError, match=r"kind is 'full'; expected one of \['sliding'\]"):
        sequence.blocks()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, "nonsense"), InvalidValueError, r"kind is 'nonsense'; expected one of \['full', 'sliding'\]"),
        ((-1,), InvalidValueError, "block is -1; expected an integer >= 0"),
        (("0",), InvalidTypeError, "block is a str"),
    ],
)
def test_holders_are_counted_of_blocks_of_a_kind(arguments, error, message):
    with pytest.raises(error, match=f"^{message}"):
        new_pool().num_holders(*arguments)


ACTS = {
    "fork": lambda sequence: sequence.fork(),
    "rollback": lambda sequence: sequence.rollback(1),
    "rollback of nothing": lambda sequence: sequence.rollback(0),
    "can_rollback": lambda sequence: sequence.can_rollback(1),
    "truncate": lambda sequence: sequence.truncate(0),
    "free": lambda sequence: sequence.free(),
    "blocks": lambda sequence: sequence.blocks(),
    "step": lambda sequence: sequence.pool.step([sequence], [[1]]),
}


@pytest.mark.parametrize("act", ACTS)
def test_a_freed_sequence_cannot_be_used(act):  # case F12
    pool, sequence = filled(6)
    other = sequence.fork()
    sequence.free()
    before = content(pool)
    with pytest.raises(InvalidValueError, match=r"^.* was freed; make another with pool.new_sequence\(\)$"):
        ACTS[act](sequence)
    assert content(pool) == before
    assert sequence.is_freed
    assert (sequence.seq_len, sequence.tokens) == (6, [1, 2, 3, 4, 5, 6])
    assert [pool.num_holders(block) for block in other.blocks()] == [1, 1]
    pool.check()


@pytest.mark.parametrize("act", ACTS)
def test_a_sequence_in_an_open_step_can_only_wait(act):
    pool, sequence = filled(6)
    before = content(pool)
    step = pool.step([sequence], [[7]])
    with pytest.raises(InvalidValueError, match=r"^.* is in an open step; commit or abort that first$"):
        ACTS[act](sequence)
    assert step.is_open
    assert (sequence.seq_len, sequence.tokens) == (6, [1, 2, 3, 4, 5, 6])
    pool.check()
    step.abort()
    assert content(pool) == before


def test_check_walks_pools_with_open_steps():
    pool, sequence = filled(6)
    branch, other = sequence.fork(), pool.new_sequence()
    pool.check()
    first = pool.step([sequence, other], [[7], [8, 9]])
    pool.check()
    second = pool.step([branch], [[7, 8, 9]])
    pool.check()
    append_layers(second)
    second.commit()
    pool.check()
    first.abort()
    pool.check()


def lose_a_token(pool, sequence):
    sequence._tokens = array("q", sequence.tokens[:4])


def add_tokens(pool, sequence):
    sequence._tokens.extend([1, 2, 3])


def lose_a_block(pool, sequence):
    sequence.table("sliding").blocks.pop()


def name_another_block(pool, sequence):
    sequence.table("full").blocks[0] = 5


def name_a_block_twice(pool, sequence):
    sequence.table("full").blocks[1] = 0


def release_a_block(pool, sequence):
    pool._ledgers["full"].release(1, sequence.table("full"))


def retain_for_nobody(pool, sequence):
    pool._ledgers["sliding"].retain(1, "nobody")


def forget_a_sequence(pool, sequence):
    del pool._sequences[sequence]


def lose_a_free_block(pool, sequence):
    pool._ledgers["full"]._free.remove(5)


def lose_the_last_block(pool, sequence):
    pool._ledgers["full"]._free.remove(7)


def free_a_held_block(pool, sequence):
    pool._ledgers["sliding"]._free.append(1)


def forget_an_open_step(pool, sequence):
    sequence.fork()
    pool.step([sequence], [[7]])
    sequence.open_step = None


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lose_a_token, "2 blocks for 4 tokens; expected 1"),
        (add_tokens, "2 blocks for 9 tokens; expected 3"),
        (lose_a_block, "held are"),
        (name_another_block, "held are"),
        (name_a_block_twice, "names block 0 twice"),
        (release_a_block, "held are"),
        (retain_for_nobody, "held are"),
        (forget_a_sequence, "held are"),
        (lose_a_free_block, "blocks are lost"),
        (lose_the_last_block, "blocks are lost"),
        (free_a_held_block, r"blocks are free and held: \[1\]"),
        (forget_an_open_step, "held are"),
    ],
)
def test_check_finds(fault, message):
    pool, sequence = filled(6)
    pool.check()
    fault(pool, sequence)
    with pytest.raises(AssertionError, match=message):
        pool.check()


def test_a_with_statement_frees_its_sequence_whatever_ends_it():
    pool = new_pool()
    with pool.new_sequence() as text:
        append_only(pool, {text: [1, 2, 3]})
        assert not text.is_freed
    assert text.is_freed
    with contextlib.suppress(RuntimeError), pool.new_sequence() as text:
        append_only(pool, {text: [1, 2, 3]})
        raise RuntimeError
    with pool.new_sequence() as text:
        text.free()
    assert (pool.sequences, pool.num_free) == ([], pool.num_blocks)
