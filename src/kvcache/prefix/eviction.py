"""Which of the blocks that nobody uses goes first when room is needed.

A policy is a function of a kept block that returns what blocks are sorted by: the lowest goes first, among those that
may go. It is asked once each time that nobody else holds a block any more, so what it returns may not change meanwhile.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from kvcache.prefix.nodes import KeptBlock, Node
from kvcache.storage.ledger import BlockLedger

Policy = Callable[[KeptBlock], Any]


def least_recently_used(kept: KeptBlock) -> int:
    """Let the block go first that nobody has used for the longest time."""
    return kept.last_used


def first_in_first_out(kept: KeptBlock) -> int:
    """Let the block go first that was kept first."""
    return kept.created


class EvictionQueue:
    """The kept blocks of one kind of layers; it holds each of them in the ledger, as its keeper.

    Args:
        ledger: of the kind.
        policy: what is sorted by.
        may_go: whether a block may go now; what forbids it must end with `reconsider`.
        evict: called with the block that is to go; it must `release` that, and what cannot be without it.
    """

    def __init__(
        self,
        ledger: BlockLedger,
        policy: Policy,
        may_go: Callable[[KeptBlock], bool],
        evict: Callable[[KeptBlock], None],
    ) -> None:
        self._ledger = ledger
        self._policy = policy
        self._may_go = may_go
        self._evict = evict
        self._clock: Iterator[int] = itertools.count()
        self.blocks: dict[int, KeptBlock] = {}
        self._fresh: dict[int, None] = {}  # blocks that may go and that the policy was not asked about since
        # Of each idle block the last entry is true; earlier ones, and those of blocks in use, are passed over.
        self._heap: list[tuple[Any, int, int]] = []  # what the policy says, the entry's number, the block
        self._entries: dict[int, int] = {}  # the last entry of a block

    def is_idle(self, kept: KeptBlock) -> bool:
        """Whether nobody else holds a block."""
        return self._ledger.is_idle(kept.block)

    def keep(self, block: int, node: Node) -> KeptBlock:
        """Hold a block that somebody holds."""
        self._ledger.retain(block, self)
        kept = self.blocks[block] = KeptBlock(block, node, next(self._clock))
        return kept

    def release(self, kept: KeptBlock) -> None:
        """Let a block go."""
        del self.blocks[kept.block]
        self._fresh.pop(kept.block, None)
        self._entries.pop(kept.block, None)
        self._ledger.release(kept.block, self)

    def note_idle(self, block: int) -> None:
        """Take note that nobody else holds this block any more."""
        self.blocks[block].last_used = next(self._clock)
        self._fresh[block] = None

    def reconsider(self, kept: KeptBlock) -> None:
        """Take note that a block may go now."""
        if self.is_idle(kept):
            self._fresh[kept.block] = None

    def let_go(self) -> bool:
        """Evict the idle block that the policy says, and say whether there was one.

        Raises:
            What the policy raises. Nothing has changed then.
        """
        if self._fresh:
            for block in list(self._fresh):
                self._push(self.blocks[block])
                del self._fresh[block]
            self._fresh = {}  # a dictionary that was large stays slow to look through
        while self._heap:
            _, entry, block = heapq.heappop(self._heap)
            if self._entries.get(block) != entry:
                continue
            del self._entries[block]
            kept = self.blocks[block]
            if self.is_idle(kept) and self._may_go(kept):
                self._evict(kept)
                return True
        idle = self._ledger.any_idle()
        if idle is None:
            return False
        self._evict(self.blocks[idle])  # what is behind it is in use by forks that have their own copy of this one
        return True

    def check(self) -> None:
        """Check that every idle block that may go is waiting for it."""
        entered = {block for _, entry, block in self._heap if self._entries.get(block) == entry}
        assert self._entries.keys() == entered
        waiting = entered | self._fresh.keys()
        assert waiting <= self.blocks.keys()
        for block, kept in self.blocks.items():
            assert not (self.is_idle(kept) and self._may_go(kept)) or block in waiting, f"{kept} would never go"

    def _push(self, kept: KeptBlock) -> None:
        entry = next(self._clock)
        heapq.heappush(self._heap, (self._policy(kept), entry, kept.block))
        self._entries[kept.block] = entry
        if len(self._heap) > 2 * len(self.blocks) + 64:
            self._heap = [item for item in self._heap if self._entries.get(item[2]) == item[1]]
            heapq.heapify(self._heap)
