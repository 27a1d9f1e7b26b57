import pytest

from kvcache import OutOfBlocksError
from kvcache.storage.ledger import BlockLedger
from kvcache.storage.reservation import Reservation, num_blocks_needed, planned
from kvcache.storage.table import BlockTable


def new_table(ledger, length, block_size=4):
    table = BlockTable(ledger, block_size, window=None, sinks=0)
    table.grow(table.num_blocks_for(length))
    return table


def reserved(kind, requests):
    return Reservation(planned(kind, requests))


def state_of(ledger, *tables):
    return list(ledger._free), ledger.holders, [table.blocks.tolist() for table in tables]


def check(ledger, tables, reservation=None):
    ledger.check([*((table, table.blocks) for table in tables), *(reservation.claims if reservation else [])])


def blocks(*tables):
    return [table.blocks.tolist() for table in tables]


def test_two_forks_share_the_full_block_and_one_of_them_copies_the_open_one():
    ledger = BlockLedger(num_blocks=8)
    text = new_table(ledger, 6)
    branch = text.fork()
    reservation = reserved("full", [(text, 6, 1), (branch, 6, 2)])
    assert blocks(text, branch) == [[0, 2], [0, 1]]
    assert reservation.copies == [(1, 2)]
    assert [ledger.num_holders(block) for block in range(4)] == [2, 2, 1, 0]  # 1 may have to go back to text
    check(ledger, [text, branch], reservation)
    reservation.settle()
    assert [ledger.num_holders(block) for block in range(4)] == [2, 1, 1, 0]
    check(ledger, [text, branch])


def test_one_fork_alone_copies_and_the_other_then_need_not():
    ledger = BlockLedger(num_blocks=8)
    text = new_table(ledger, 6)
    branch = text.fork()
    first = reserved("full", [(branch, 6, 1)])
    first.settle()
    second = reserved("full", [(text, 6, 1)])
    second.settle()
    assert (first.copies, second.copies) == ([(1, 2)], [])
    assert blocks(text, branch) == [[0, 1], [0, 2]]
    assert ledger.holders == {0: {text, branch}, 1: {text}, 2: {branch}}


@pytest.mark.parametrize("members", [1, 2, 3])
@pytest.mark.parametrize("others", [0, 1, 2])
def test_forks_that_step_together_copy_except_one_of_them_if_nobody_else_holds_the_block(members, others):
    ledger = BlockLedger(num_blocks=9)
    text = new_table(ledger, 6)
    tables = [text, *(text.fork() for _ in range(members + others - 1))]
    reservation = reserved("full", [(table, 6, 1) for table in tables[:members]])
    num_copies = members if others else members - 1
    assert reservation.copies == [(1, 2 + place) for place in range(num_copies)]
    assert ledger.num_free == 9 - 2 - num_copies
    assert blocks(*tables) == [[0, 2 + place] for place in range(num_copies)] + [[0, 1]] * (len(tables) - num_copies)
    check(ledger, tables, reservation)
    reservation.settle()
    assert ledger.num_holders(1) == max(others, 1)
    check(ledger, tables)


@pytest.mark.parametrize("length", [0, 4, 8])
def test_at_a_block_border_nothing_is_copied(length):
    ledger = BlockLedger(num_blocks=9)
    text = new_table(ledger, length)
    tables = [text, text.fork(), text.fork()]
    shared = text.blocks.tolist()
    reservation = reserved("full", [(table, length, 1) for table in tables])
    assert reservation.copies == reservation.claims == []
    new = len(shared)
    assert blocks(*tables) == [[*shared, new], [*shared, new + 1], [*shared, new + 2]]


def test_a_copy_and_new_blocks_are_counted_together():
    ledger = BlockLedger(num_blocks=8)
    text = new_table(ledger, 6)
    branch = text.fork()
    assert num_blocks_needed([(branch, 6, 7)]) == 3
    reservation = reserved("full", [(branch, 6, 7)])  # 13 tokens: a copy of block 1, and two new ones
    assert blocks(text, branch) == [[0, 1], [0, 2, 3, 4]]
    assert reservation.copies == [(1, 2)]
    reservation.undo()
    assert ledger.num_free == 6
    ledger = BlockLedger(num_blocks=4)
    text = new_table(ledger, 6)
    branch = text.fork()
    with pytest.raises(OutOfBlocksError) as caught:
        reserved("full", [(branch, 6, 7)])
    assert (caught.value.kind, caught.value.needed, caught.value.available) == ("full", 3, 2)


def test_tables_that_share_nothing_grow_in_place():
    ledger = BlockLedger(num_blocks=8)
    tables = [new_table(ledger, length) for length in (3, 4, 5)]
    reservation = reserved("full", [(table, length, 2) for table, length in zip(tables, (3, 4, 5), strict=True)])
    assert reservation.copies == []
    assert blocks(*tables) == [[0, 4], [1, 5], [2, 3]]


def test_growing_after_a_rollback_into_a_shared_block_copies_it():
    ledger = BlockLedger(num_blocks=4)
    text = new_table(ledger, 8)
    branch = text.fork()
    branch.shorten(7)
    assert ledger.num_holders(1) == 2
    reservation = reserved("full", [(branch, 7, 1)])
    assert reservation.copies == [(1, 2)]
    assert blocks(text, branch) == [[0, 1], [0, 2]]


def test_a_copy_for_which_no_block_is_free_is_refused_and_changes_nothing():
    ledger = BlockLedger(num_blocks=2)
    text = new_table(ledger, 8)
    branch = text.fork()
    branch.shorten(7)
    before = state_of(ledger, text, branch)
    with pytest.raises(OutOfBlocksError) as caught:
        reserved("sliding", [(branch, 7, 1)])
    assert (caught.value.kind, caught.value.needed, caught.value.available) == ("sliding", 1, 0)
    assert str(caught.value).startswith("blocks of the sliding layers: 1 needed for the step, 0 available; free")
    assert state_of(ledger, text, branch) == before
    text.shorten(4)  # then nobody else holds the block
    assert reserved("sliding", [(branch, 7, 1)]).copies == []


def test_a_whole_step_is_refused_if_its_last_table_does_not_fit():
    ledger = BlockLedger(num_blocks=6)
    tables = [new_table(ledger, 4) for _ in range(3)]
    before = state_of(ledger, *tables)
    with pytest.raises(OutOfBlocksError) as caught:
        reserved("full", [(table, 4, 5) for table in tables])
    assert (caught.value.needed, caught.value.available) == (6, 3)
    assert state_of(ledger, *tables) == before
    reserved("full", [(table, 4, 4) for table in tables])  # exactly what is free
    assert ledger.num_free == 0


def test_undo_restores_tables_holders_and_the_order_of_free_blocks():
    ledger = BlockLedger(num_blocks=12)
    text = new_table(ledger, 6)
    alone = new_table(ledger, 3)
    scrap = new_table(ledger, 9)
    tables = [text, text.fork(), text.fork(), alone]
    scrap.shorten(0)
    before = state_of(ledger, *tables)
    counts = [1, 7, 3, 6]
    reservation = reserved("full", zip(tables, [6, 6, 6, 3], counts, strict=True))
    assert ledger.num_free == 2  # 2 copies, and 0, 2, 1 and 2 new blocks
    assert state_of(ledger, *tables) != before
    reservation.undo()
    assert state_of(ledger, *tables) == before
    check(ledger, tables)


def test_undo_gives_a_block_back_that_everybody_else_has_let_go():
    ledger = BlockLedger(num_blocks=4)
    text = new_table(ledger, 6)
    branch = text.fork()
    reservation = reserved("full", [(text, 6, 1)])
    branch.shorten(0)
    stranger = new_table(ledger, 4)
    assert blocks(text, stranger) == [[0, 2], [3]]  # block 1 is kept for the way back
    reservation.undo()
    assert blocks(text) == [[0, 1]]
    assert ledger.holders == {0: {text}, 1: {text}, 3: {stranger}}


def test_settling_frees_a_block_that_everybody_has_let_go():
    ledger = BlockLedger(num_blocks=4)
    text = new_table(ledger, 6)
    branch = text.fork()
    reservation = reserved("full", [(text, 6, 1)])
    branch.shorten(0)
    reservation.settle()
    assert ledger.holders == {0: {text}, 2: {text}}
    assert ledger.allocate("another") == 1


@pytest.mark.parametrize("end", ["settle", "undo"])
def test_two_reservations_on_one_block_end_in_any_order(end):
    ledger = BlockLedger(num_blocks=6)
    text = new_table(ledger, 6)
    branch = text.fork()
    first, second = (reserved("full", [(table, 6, 1)]) for table in (text, branch))
    assert blocks(text, branch) == [[0, 2], [0, 3]]  # text may still go back to block 1
    ledger.check([*((table, table.blocks) for table in (text, branch)), *first.claims, *second.claims])
    getattr(first, end)()
    second.undo()
    assert blocks(text, branch) == [[0, 2 if end == "settle" else 1], [0, 1]]
    check(ledger, [text, branch])


def test_no_requests_reserve_nothing():
    reservation = reserved("full", [])
    assert reservation.copies == reservation.claims == []
    reservation.undo()
    reservation.settle()


@pytest.mark.parametrize("longest", [0, 1, 2])
def test_the_longest_of_the_tables_that_share_a_block_writes_in_place(longest):
    """Whoever writes in the shared block must not overwrite a row that another one may go back to."""
    ledger = BlockLedger(num_blocks=8)
    text = new_table(ledger, 7)
    tables = [text, text.fork(), text.fork()]
    lengths = [5, 6, 5]
    lengths[longest] = 7
    reservation = reserved("full", [(table, length, 1) for table, length in zip(tables, lengths, strict=True)])
    assert len(reservation.copies) == 2
    assert [table.blocks[-1] == 1 for table in tables] == [place == longest for place in range(3)]
