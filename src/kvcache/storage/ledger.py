"""Who holds which block: pure bookkeeping, without a tensor.

A block is free, or has at least one holder. A holder is any object, told apart by identity: the block table of a
sequence, or a step that may have to give a block back to one. How often a block is used is the number of its holders,
and nothing else counts it.

One holder may be the *keeper*, who holds blocks beyond their use because they may be of use again. A block that only
the keeper holds is *idle*: it is as good as free, since the keeper lets it go when nothing else is left.
"""

from collections.abc import Collection, Iterable
from typing import Any, Protocol

from kvcache.checks import check_int
from kvcache.errors import InvalidValueError


class Keeper(Protocol):
    """Who holds blocks beyond their use; see the module."""

    @property
    def blocks(self) -> Collection[int]:
        """The blocks that it holds."""

    def note_idle(self, block: int) -> None:
        """Take note that nobody else holds this block any more."""

    def let_go(self) -> bool:
        """Release at least one idle block, and say whether there was one."""


class BlockLedger:
    """The holders of blocks 0 .. num_blocks - 1 of one kind of layers; acts but `add` take equally long for any.

    Blocks are handed out from 0 up, freed ones again before new ones, the last freed first.

    >>> ledger = BlockLedger(num_blocks=3)
    >>> block = ledger.allocate("a")
    >>> ledger.retain(block, "b")
    >>> ledger.release(block, "a")
    >>> block, ledger.num_holders(block), ledger.num_free
    (0, 1, 2)
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(reversed(range(num_blocks)))  # the next one last
        self._holders: dict[int, set[object]] = {}
        self._idle: set[int] = set()
        self._keeper: Keeper | None = None

    @property
    def num_free(self) -> int:
        """Blocks without a holder."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out: free ones, and idle ones once `make_room` has freed them."""
        return len(self._free) + len(self._idle)

    @property
    def holders(self) -> dict[int, frozenset[object]]:
        """The holders of each block that is not free: a snapshot."""
        return {block: frozenset(holders) for block, holders in self._holders.items()}

    def add(self, num_blocks: int) -> None:
        """Let there be more blocks, which go out after those that are free already; takes longer the more they are."""
        self._free[:0] = reversed(range(self.num_blocks, self.num_blocks + num_blocks))
        self.num_blocks += num_blocks

    def check_block(self, block: Any) -> int:
        """Return `block`, the id of a block that there is, as a plain int."""
        number = check_int("block", block, minimum=0)
        if number >= self.num_blocks:
            raise InvalidValueError(f"block is {number}; expected one of the {self.num_blocks}, counted from 0")
        return number

    def num_holders(self, block: int) -> int:
        """Return how many hold `block`."""
        return len(self._holders.get(block, ()))

    def make_room(self, num_blocks: int) -> None:
        """Let the keeper let go of idle blocks until so many are free, or none is idle."""
        while self._keeper is not None and len(self._free) < num_blocks and self._keeper.let_go():
            pass

    def is_idle(self, block: int) -> bool:
        """Whether only the keeper holds `block`."""
        return block in self._idle

    def any_idle(self) -> int | None:
        """Return an idle block, if there is one."""
        return next(iter(self._idle), None)

    def set_keeper(self, keeper: Keeper) -> None:
        """Let `keeper`, who holds nothing yet, be the one whose blocks are idle where nobody else holds them."""
        self._keeper = keeper

    def allocate(self, holder: object) -> int:
        """Give a free block to `holder`; there must be one."""
        block = self._free.pop()
        self._holders[block] = {holder}
        return block

    def retain(self, block: int, holder: object) -> None:
        """Add a holder to a block that others hold.

        Raises:
            InvalidValueError: `block` is free, or `holder` holds it already.
        """
        holders = self._holders.get(block)
        if holders is None or holder in holders:
            raise InvalidValueError(f"block {block} is {'free' if holders is None else 'held already'}")
        holders.add(holder)
        self._idle.discard(block)

    def release(self, block: int, holder: object) -> None:
        """Take a holder from `block`; the last one frees it.

        Raises:
            InvalidValueError: `holder` does not hold it, because it never did or has released it already.
        """
        holders = self._holders.get(block)
        if holders is None or holder not in holders:
            raise InvalidValueError(f"block {block} is released by one that does not hold it")
        holders.remove(holder)
        if not holders:
            del self._holders[block]
            self._idle.discard(block)
            self._free.append(block)
        elif (keeper := self._keeper) is not None and len(holders) == 1 and keeper in holders:
            self._idle.add(block)
            keeper.note_idle(block)

    def check(self, claims: Iterable[tuple[object, Iterable[int]]]) -> None:
        """Check that each block is free or held, and that the holders are exactly those that `claims` lists.

        Args:
            claims: each holder there should be besides the keeper, and its blocks.

        Raises:
            AssertionError: the books are wrong, which is a fault of this package.
        """
        free = set(self._free)
        assert len(free) == len(self._free), f"blocks are free twice: {sorted(self._free)}"
        assert not free & self._holders.keys(), f"blocks are free and held: {sorted(free & self._holders.keys())}"
        assert free | self._holders.keys() == set(range(self.num_blocks)), "blocks are lost"
        claimed: dict[int, set[object]] = {}
        kept = [] if self._keeper is None else [(self._keeper, self._keeper.blocks)]
        for holder, blocks in (*claims, *kept):
            for block in blocks:
                holders = claimed.setdefault(block, set())
                assert holder not in holders, f"{holder!r} names block {block} twice"
                holders.add(holder)
        assert claimed == self._holders, f"held are {self._holders}, and named by their holders {claimed}"
        idle = {block for block, holders in self._holders.items() if holders == {self._keeper}}
        assert self._idle == idle, f"idle are {sorted(self._idle)}, and held by the keeper alone {sorted(idle)}"
