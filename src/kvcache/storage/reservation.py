"""Blocks for the new tokens of several sequences, taken at once, with the way back: pure bookkeeping.

A block that others hold too is not written: the table that grows into it takes a copy in its place (copy-on-write).
Where all holders of a block grow at once, the longest keeps it, of equally long ones the last: it writes behind the
rows of all others, which are as they were if the others come back to the block.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvcache.errors import OutOfBlocksError
from kvcache.storage.table import BlockTable


@dataclass(frozen=True, eq=False)
class Growth:
    """What changes in one table. It holds a replaced block itself, so that nobody else gets it before the end."""

    table: BlockTable
    num_new: int
    replaced: int | None = None

    @property
    def copy(self) -> int:
        """The block in the place of the replaced one."""
        return self.table.blocks[-1 - self.num_new]

    def undo(self) -> None:
        """Give the new blocks back, and the table its old one."""
        self.table.shrink(self.num_new)
        if self.replaced is not None:
            self.table.restore_last(self.replaced)
        self.settle()

    def settle(self) -> None:
        """Let the replaced block go."""
        if self.replaced is not None:
            self.table.ledger.release(self.replaced, self)


Request = tuple[BlockTable, int, int]  # a table, the tokens it holds and those to come
Plan = list[tuple[BlockTable, int, bool]]  # tables, how many blocks each gets, whether its open one is copied


class Reservation:
    """Room for new tokens in tables of one kind, as `planned` has found that there is."""

    def __init__(self, plan: Plan) -> None:
        if plan:
            plan[0][0].ledger.make_room(_num_blocks(plan))
        self.growths = [_grow(*entry) for entry in plan]

    @property
    def copies(self) -> list[tuple[int, int]]:
        """Blocks whose rows must be copied, (source, target)."""
        return [(growth.replaced, growth.copy) for growth in self.growths if growth.replaced is not None]

    @property
    def claims(self) -> list[tuple[object, list[int]]]:
        """What the reservation itself holds in the ledger."""
        return [(growth, [growth.replaced]) for growth in self.growths if growth.replaced is not None]

    def settle(self) -> None:
        """Make it final."""
        for growth in self.growths:
            growth.settle()

    def undo(self) -> None:
        """Leave every table as it was."""
        for growth in reversed(self.growths):
            growth.undo()


def planned(kind: str, requests: Iterable[Request]) -> Plan:
    """Return what a `Reservation` has to do; nothing changes by that.

    Args:
        kind: of the layers, for the error.
        requests: for each table itself, the tokens it holds and those to come.

    Raises:
        OutOfBlocksError: too few blocks are free or idle.
    """
    plan = list(_plan(requests))
    if plan and (needed := _num_blocks(plan)) > (available := plan[0][0].ledger.num_available):
        raise OutOfBlocksError(kind, needed, available)
    return plan


def num_blocks_needed(requests: Iterable[Request]) -> int:
    """Return how many free blocks a `Reservation` takes."""
    return _num_blocks(_plan(requests))


def _num_blocks(plan: Iterable[tuple[BlockTable, int, bool]]) -> int:
    return sum(num_new + copies for _, num_new, copies in plan)


def _plan(requests: Iterable[Request]) -> Iterator[tuple[BlockTable, int, bool]]:
    requests = list(requests)
    writers = _writers(requests)
    for table, length, num_tokens in requests:
        num_new = table.num_blocks_for(length + num_tokens) - table.num_blocks_for(length)
        block = table.open_block(length)
        yield table, num_new, block is not None and writers.get(block) is not table


def _writers(requests: list[Request]) -> dict[int, BlockTable]:
    """Return who may write each open block that is held by none but tables that grow: of several the longest."""
    growing: dict[int, list[BlockTable]] = {}
    for table, length, _ in sorted(requests, key=lambda request: request[1]):
        if (block := table.open_block(length)) is not None:
            growing.setdefault(block, []).append(table)
    return {
        block: tables[-1] for block, tables in growing.items() if tables[-1].ledger.num_holders(block) == len(tables)
    }


def _grow(table: BlockTable, num_new: int, copies: bool) -> Growth:
    replaced = table.blocks[-1] if copies else None
    growth = Growth(table, num_new, replaced)
    if replaced is not None:
        table.ledger.retain(replaced, growth)
        table.replace_last()
    table.grow(num_new)
    return growth
