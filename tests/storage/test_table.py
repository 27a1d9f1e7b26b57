import pytest

from kvcache.storage.ledger import BlockLedger
from kvcache.storage.table import BlockTable
from tests.oracle import visible_positions

RULES = [
    (4, None, 0),
    (1, None, 0),
    (4, 6, 2),
    (4, 6, 0),
    (4, 4, 4),
    (3, 4, 2),
    (1, 3, 2),
    (2, 2, 5),
    (5, 2, 1),
    (8, 3, 1),
]
every_rule = pytest.mark.parametrize(("block_size", "window", "sinks"), RULES)


def new_table(block_size=4, window=None, sinks=0, num_blocks=40):
    return BlockTable(BlockLedger(num_blocks), block_size, window, sinks)


def grow_to(table, length):
    """Give the table tokens up to this length, as a step and its commit do."""
    table.grow(table.num_blocks_for(length) - table.num_dropped - len(table.blocks))
    table.drop_left_behind(length)


def filled(length, **rule):
    """Return a table that was given `length` tokens one by one."""
    table = new_table(**rule)
    for end in range(1, length + 1):
        grow_to(table, end)
    return table


def held_places(table, length):
    """Return which blocks of the sequence, counted from its first token, the table still holds."""
    first, dropped = table.num_sink_blocks, table.num_dropped
    return [place for place in range(table.num_blocks_for(length)) if not first <= place < first + dropped]


@pytest.mark.parametrize(("length", "blocks"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (11, 3), (12, 3), (13, 4)])
def test_a_sequence_has_as_many_blocks_as_its_tokens_fill(length, blocks):  # case F9
    table = new_table()
    assert table.num_blocks_for(length) == blocks
    table.grow(blocks)
    assert table.blocks.tolist() == list(range(blocks))
    table.check(length)


def test_twelve_tokens_fill_the_last_of_three_blocks():  # case F9
    table = filled(12)
    assert list(table.places(8, 12)) == [(2, 0), (2, 1), (2, 2), (2, 3)]
    assert table.open_block(12) is None
    assert [table.ledger.num_holders(block) for block in table.blocks] == [1, 1, 1]
    table.shorten(0)
    assert [table.ledger.num_holders(block) for block in range(3)] == [0, 0, 0]
    assert table.ledger.num_free == 40


def test_the_open_block_is_the_one_that_takes_the_next_token():
    table = new_table()
    assert table.open_block(0) is None
    table.grow(2)
    assert [table.open_block(length) for length in (5, 6, 7, 8)] == [1, 1, 1, None]


def test_places_of_positions_follow_the_table():
    table = new_table()
    table.ledger.allocate("another")
    table.grow(1)
    table.ledger.allocate("another")
    table.grow(1)
    assert list(table.places(2, 6)) == [(1, 2), (1, 3), (3, 0), (3, 1)]
    assert list(table.places(3, 3)) == []


def test_blocks_that_go_are_free_again_in_the_order_they_went():
    table = filled(14)
    table.shrink(2)
    assert table.blocks.tolist() == [0, 1]
    table.grow(2)
    assert table.blocks.tolist() == [0, 1, 2, 3]


def test_a_block_is_replaced_and_put_back():
    table = filled(6)
    other = table.fork()
    table.replace_last()
    assert (table.blocks.tolist(), other.blocks.tolist()) == ([0, 2], [0, 1])
    assert table.ledger.holders == {0: {table, other}, 1: {other}, 2: {table}}
    table.restore_last(1)
    assert (table.blocks.tolist(), other.blocks.tolist()) == ([0, 1], [0, 1])
    assert table.ledger.holders == {0: {table, other}, 1: {table, other}}


def test_a_replaced_block_that_nobody_else_holds_is_free():
    table = filled(6)
    table.replace_last()
    assert table.blocks.tolist() == [0, 2]
    assert table.ledger.holders == {0: {table}, 2: {table}}


def test_the_window_of_the_picture_leaves_two_blocks_behind_with_its_eighteenth_token():
    ledger = BlockLedger(num_blocks=8)
    for _ in range(8):
        ledger.allocate("another")
    for block in (7, 2, 4, 1, 5):
        ledger.release(block, "another")
    table = BlockTable(ledger, block_size=4, window=6, sinks=2)
    grow_to(table, 17)  # the newest query, at 16, sees 11 .. 16: block 4 has a row for it
    assert table.blocks.tolist() == [5, 4, 2, 7]
    assert (table.num_dropped, table.first_held) == (1, 8)
    grow_to(table, 18)
    assert table.blocks.tolist() == [5, 2, 7]
    assert (table.num_sink_blocks, table.num_dropped, table.first_held) == (1, 2, 12)
    assert [table.slot(position) for position in (12, 15, 16, 17, 18)] == [4, 7, 8, 9, 10]
    assert list(table.places(14, 18)) == [(2, 2), (2, 3), (7, 0), (7, 1)]
    assert [ledger.num_holders(block) for block in (5, 1, 4, 2, 7)] == [1, 0, 0, 1, 1]
    table.check(18)


@every_rule
@pytest.mark.parametrize("step", [1, 3, 7])
def test_blocks_go_as_soon_as_the_newest_query_sees_none_of_their_rows(block_size, window, sinks, step):
    table = new_table(block_size, window, sinks)
    for length in [*range(step, 30, step), 30]:
        grow_to(table, length)
        seen = set(visible_positions(length - 1, window=window, sinks=sinks))
        oldest_in_window = 0 if window is None else length - window
        expected = [
            place
            for place in range(-(-length // block_size))
            if place * block_size < sinks or (place + 1) * block_size > oldest_in_window
        ]
        assert held_places(table, length) == expected
        assert {position // block_size for position in seen} <= set(expected)
        table.check(length)
        table.ledger.check([(table, table.blocks)])


@every_rule
def test_queries_see_in_slots_what_they_see_in_positions(block_size, window, sinks):
    for length in range(31):
        table = filled(length, block_size=block_size, window=window, sinks=sinks)
        seen = visible_positions(length, window=window, sinks=sinks)
        slots = [position if position < table.first_held else table.slot(position) for position in seen]
        assert slots == visible_positions(table.slot(length), window=window, sinks=sinks)


@every_rule
def test_a_shorter_sequence_is_held_if_all_that_its_next_query_sees_is(block_size, window, sinks):
    for length in range(31):
        table = filled(length, block_size=block_size, window=window, sinks=sinks)
        held = set(held_places(table, length))
        for shorter in range(length + 1):
            needed = {p // block_size for p in visible_positions(shorter, window=window, sinks=sinks) if p < shorter}
            assert table.holds(shorter) == (needed <= held), (length, shorter)
        assert table.holds(max(0, length - 1))


def test_the_narrowest_window_goes_back_to_its_gap_and_no_further():
    table = filled(14, window=1)
    assert (table.num_dropped, table.first_held) == (3, 12)
    assert [length for length in range(15) if table.holds(length)] == [0, 12, 13, 14]


@every_rule
def test_shortening_leaves_the_blocks_of_the_shorter_sequence(block_size, window, sinks):
    for length in range(31):
        for shorter in range(length + 1):
            table = filled(length, block_size=block_size, window=window, sinks=sinks)
            if not table.holds(shorter):
                continue
            by_place = dict(zip(held_places(table, length), table.blocks, strict=True))
            table.shorten(shorter)
            held = held_places(table, shorter)
            assert table.blocks.tolist() == [by_place[place] for place in held]
            assert held == [place for place in by_place if place * block_size < shorter]
            table.check(shorter)
            table.ledger.check([(table, table.blocks)])


def test_shortening_into_the_sinks_closes_the_gap():
    table = filled(18, window=6, sinks=2)
    assert table.blocks.tolist() == [0, 3, 1]
    table.shorten(3)
    assert (table.blocks.tolist(), table.num_dropped, table.first_held) == ([0], 0, 0)
    grow_to(table, 5)
    assert table.blocks.tolist() == [0, 3]
    assert table.slot(4) == 4


def test_freeing_releases_every_block_of_a_table_with_a_gap():
    table = filled(18, window=6, sinks=2)
    table.shorten(0)
    assert table.blocks.tolist() == []
    assert table.ledger.holders == {}


def test_dropped_blocks_stay_dropped_when_the_sequence_goes_back():
    table = filled(18, window=6, sinks=2)
    table.shorten(17)
    table.drop_left_behind(17)
    assert (table.blocks.tolist(), table.num_dropped) == ([0, 3, 1], 2)
    table.check(17)


def test_a_long_step_leaves_all_its_blocks_behind_at_once():
    table = new_table(window=6, sinks=2)
    table.grow(table.num_blocks_for(33))
    table.drop_left_behind(33)
    assert table.blocks.tolist() == [0, 6, 7, 8]
    assert table.first_held == 24


def test_without_a_window_nothing_goes():
    table = filled(30)
    assert table.blocks.tolist() == list(range(8))
    assert (table.num_dropped, table.first_held) == (0, 0)
    assert all(table.holds(length) for length in range(31))


def test_a_fork_of_a_table_with_a_gap_goes_its_own_way():
    table = filled(18, window=6, sinks=2)
    fork = table.fork()
    assert fork.blocks.tolist() == table.blocks.tolist() == [0, 3, 1]
    assert (fork.num_dropped, fork.first_held, fork.slot(18)) == (2, 12, 10)
    assert table.ledger.holders == {block: {table, fork} for block in (0, 1, 3)}
    grow_to(fork, 22)
    assert (fork.blocks.tolist(), fork.num_dropped) == ([0, 1, 2], 3)
    assert (table.blocks.tolist(), table.num_dropped) == ([0, 3, 1], 2)
    assert table.ledger.holders == {0: {table, fork}, 1: {table, fork}, 2: {fork}, 3: {table}}
    table.shorten(0)
    assert table.ledger.holders == {0: {fork}, 1: {fork}, 2: {fork}}
    fork.check(22)


@pytest.mark.parametrize("length", [8, 13])
def test_check_finds_a_table_of_another_length(length):
    with pytest.raises(AssertionError, match=rf"^3 blocks for {length} tokens; expected {-(-length // 4)}$"):
        filled(12).check(length)


def test_check_finds_a_gap_that_is_counted_wrong():
    table = filled(18, window=6, sinks=2)
    table.num_dropped = 1
    with pytest.raises(AssertionError, match=r"^3 blocks for 18 tokens; expected 4$"):
        table.check(18)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda table: table.blocks.append(0), "names block 0 twice"),
        (lambda table: table.blocks.pop(), "held are"),
        (lambda table: table.blocks.append(7), "held are"),
        (lambda table: table.ledger.release(1, table), "held are"),
    ],
)
def test_the_ledger_finds_a_table_that_names_other_blocks_than_it_holds(fault, message):
    table = filled(12)
    fault(table)
    with pytest.raises(AssertionError, match=message):
        table.ledger.check([(table, table.blocks)])
