import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvcache import InvalidTypeError, InvalidValueError
from kvcache.storage.ledger import BlockLedger


def test_blocks_go_out_from_zero_up():
    ledger = BlockLedger(num_blocks=4)
    assert [ledger.allocate("a") for _ in range(4)] == [0, 1, 2, 3]
    assert ledger.num_free == 0
    assert ledger.num_blocks == 4


def test_freed_blocks_go_out_before_new_ones_the_last_freed_first():
    ledger = BlockLedger(num_blocks=5)
    for _ in range(4):
        ledger.allocate("a")
    for block in (1, 3, 0):
        ledger.release(block, "a")
    assert [ledger.allocate("b") for _ in range(4)] == [0, 3, 1, 4]


def test_added_blocks_go_out_after_those_that_are_free():
    ledger = BlockLedger(num_blocks=0)
    ledger.add(2)
    assert [ledger.allocate("a") for _ in range(2)] == [0, 1]
    ledger.release(0, "a")
    ledger.add(2)
    ledger.check([("a", [1])])
    assert (ledger.num_blocks, ledger.num_free) == (4, 3)
    assert [ledger.allocate("b") for _ in range(3)] == [0, 2, 3]


def test_a_block_that_is_not_there_is_named():
    ledger = BlockLedger(num_blocks=2)
    assert ledger.check_block(1) == 1
    for bad, error, message in (
        (2, InvalidValueError, "block is 2; expected one of the 2, counted from 0"),
        (-1, InvalidValueError, "block is -1"),
        (1.0, InvalidTypeError, "block is a float"),
    ):
        with pytest.raises(error, match=message):
            ledger.check_block(bad)


def test_a_block_is_used_as_often_as_it_has_holders():  # case F9
    ledger = BlockLedger(num_blocks=2)
    assert ledger.num_holders(0) == 0
    block = ledger.allocate("a")
    counts = [ledger.num_holders(block)]
    for holder in ("b", "c"):
        ledger.retain(block, holder)
        counts.append(ledger.num_holders(block))
    assert ledger.holders == {0: {"a", "b", "c"}}
    for holder in ("b", "a", "c"):
        assert ledger.num_free == 1
        ledger.release(block, holder)
        counts.append(ledger.num_holders(block))
    assert counts == [1, 2, 3, 2, 1, 0]
    assert ledger.num_free == 2
    assert ledger.holders == {}


def some_ledger():
    """Return a ledger of 4 blocks: 0 is a's, 1 is a's and b's, 2 and 3 are free."""
    ledger = BlockLedger(num_blocks=4)
    ledger.allocate("a")
    ledger.allocate("a")
    ledger.retain(1, "b")
    return ledger


CLAIMS = [("a", [0, 1]), ("b", [1])]


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda ledger: ledger.release(0, "b"), "block 0 is released by one that does not hold it"),
        (lambda ledger: ledger.release(2, "a"), "block 2 is released by one that does not hold it"),
        (lambda ledger: ledger.release(99, "a"), "block 99 is released by one that does not hold it"),
        (lambda ledger: ledger.retain(1, "a"), "block 1 is held already"),
        (lambda ledger: ledger.retain(2, "a"), "block 2 is free"),
        (lambda ledger: ledger.retain(-1, "a"), "block -1 is free"),
    ],
)
def test_what_the_books_do_not_allow_is_refused_and_changes_nothing(act, message):  # case F12
    ledger = some_ledger()
    with pytest.raises(InvalidValueError, match=f"^{message}$"):
        act(ledger)
    assert ledger.holders == {0: {"a"}, 1: {"a", "b"}}
    assert [ledger.allocate("c") for _ in range(ledger.num_free)] == [2, 3]


def test_a_block_released_twice_goes_out_once():  # case F12
    ledger = some_ledger()
    ledger.release(0, "a")
    with pytest.raises(InvalidValueError, match="block 0 is released by one that does not hold it"):
        ledger.release(0, "a")
    assert ledger.num_free == 3
    assert [ledger.allocate("c") for _ in range(3)] == [0, 2, 3]


def test_what_was_handed_out_is_a_snapshot():
    ledger = some_ledger()
    holders = ledger.holders
    ledger.retain(0, "b")
    ledger.release(1, "a")
    assert holders == {0: {"a"}, 1: {"a", "b"}}


class Counted:
    """A holder that counts how often it is looked at."""

    looks = 0

    def __hash__(self):
        Counted.looks += 1
        return id(self)

    def __eq__(self, other):
        Counted.looks += 1
        return self is other


@pytest.mark.parametrize("act", ["retain", "release"])
def test_an_act_looks_at_one_holder_however_many_there_are(act):
    looks = []
    for num_holders in (10, 1000):
        ledger = BlockLedger(num_blocks=num_holders)
        first, *others = (Counted() for _ in range(num_holders))
        for _ in range(num_holders):
            ledger.allocate(first)
        for holder in others:
            ledger.retain(5, holder)
        Counted.looks = 0
        if act == "retain":
            ledger.retain(5, Counted())
        else:
            ledger.release(5, others[3])
        looks.append(Counted.looks)
    assert looks[0] == looks[1] <= 6


def test_check_finds_nothing_wrong_in_right_books():
    some_ledger().check(CLAIMS)
    BlockLedger(num_blocks=3).check([("a", []), ("b", [])])


def lose_a_held_block(ledger):
    del ledger._holders[0]


def lose_a_free_block(ledger):
    ledger._free.remove(2)


def lose_the_last_block(ledger):
    ledger._free.remove(3)


def free_a_block_twice(ledger):
    ledger._free.append(2)


def free_a_held_block(ledger):
    ledger._free.append(0)


def free_a_block_that_is_none(ledger):
    ledger._free.append(7)


def drop_a_holder(ledger):
    ledger._holders[1].remove("b")


def add_a_holder(ledger):
    ledger._holders[1].add("c")


def exchange_a_holder(ledger):
    ledger._holders[0] = {"b"}


def hold_by_nobody(ledger):
    ledger._holders[0] = set()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lose_a_held_block, "blocks are lost"),
        (lose_a_free_block, "blocks are lost"),
        (lose_the_last_block, "blocks are lost"),
        (free_a_block_twice, r"blocks are free twice: \[2, 2, 3\]"),
        (free_a_held_block, r"blocks are free and held: \[0\]"),
        (free_a_block_that_is_none, "blocks are lost"),
        (drop_a_holder, "held are .*, and named by their holders"),
        (add_a_holder, "held are .*, and named by their holders"),
        (exchange_a_holder, "held are .*, and named by their holders"),
        (hold_by_nobody, "held are .*, and named by their holders"),
    ],
)
def test_check_finds_a_fault_in_the_books(fault, message):
    ledger = some_ledger()
    fault(ledger)
    with pytest.raises(AssertionError, match=f"^{message}"):
        ledger.check(CLAIMS)


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        ([("a", [0, 1])], "held are"),
        ([("a", [0, 1]), ("b", [])], "held are"),
        ([("a", [0]), ("b", [0, 1])], "held are"),
        ([("a", [0, 1]), ("b", [1, 2])], "held are"),
        ([("a", [0, 1]), ("b", [1]), ("c", [1])], "held are"),
        ([("a", [0, 1, 1]), ("b", [1])], "'a' names block 1 twice"),
        ([("a", [0, 1]), ("b", [1]), ("a", [0])], "'a' names block 0 twice"),
    ],
)
def test_check_finds_holders_that_name_other_blocks(claims, message):
    with pytest.raises(AssertionError, match=f"^{message}"):
        some_ledger().check(claims)


@given(st.lists(st.tuples(st.sampled_from("arr.."), st.integers(0, 5), st.sampled_from("xyz"))))
def test_random_acts_leave_the_books_that_plain_sets_say(acts):
    ledger, held, free = BlockLedger(num_blocks=4), {}, [3, 2, 1, 0]
    for act, block, holder in acts:
        holders = held.get(block, set())
        if act == "a" and free:
            assert ledger.allocate(holder) == free[-1]
            held[free.pop()] = {holder}
        elif act == "r" and holders and holder not in holders:
            ledger.retain(block, holder)
            holders.add(holder)
        elif act == "." and holder in holders:
            ledger.release(block, holder)
            holders.remove(holder)
            if not holders:
                del held[block]
                free.append(block)
        elif act != "a":
            with pytest.raises(InvalidValueError):
                (ledger.retain if act == "r" else ledger.release)(block, holder)
        assert ledger.holders == held
        assert ledger.num_free == len(free)
        assert ledger.num_blocks == 4
        ledger.check((name, [block for block in held if name in held[block]]) for name in "xyz")
