"""Which blocks hold the rows of one sequence in the layers of one kind: pure bookkeeping, without a tensor.

    position    0 .. 3      4 .. 7      8 .. 11     12 .. 15    16 .. 19      block_size 4, window 6, sinks 2, 18 tokens
    block       5           (dropped)   (dropped)   2           7
    slot        0 .. 3                              4 .. 7      8 .. 11

With a window, blocks between the sinks' and those that the newest query sees are let go. Those that stay close up:
a row's *slot* is its place among them, which is what attention counts in. Since whole blocks go, and only from
between the sinks and the window, both look the same in slots as in positions.
"""

from array import array
from collections.abc import Iterable, Iterator

from kvcache.storage.ledger import BlockLedger
from kvcache.storage.specs import kept_rows


class BlockTable:
    """The blocks of one sequence, in order; it holds each of them in the ledger."""

    def __init__(self, ledger: BlockLedger, block_size: int, window: int | None, sinks: int) -> None:
        self.ledger = ledger
        self.block_size = block_size
        self.window = window
        self.sinks = sinks
        self.blocks = array("q")
        self.num_dropped = 0

    @property
    def num_sink_blocks(self) -> int:
        """Blocks with sinks in them, which never go."""
        return -(-self.sinks // self.block_size)

    @property
    def first_held(self) -> int:
        """The lowest position behind the gap; 0 where there is none."""
        return (self.num_sink_blocks + self.num_dropped) * self.block_size if self.num_dropped else 0

    def slot(self, position: int) -> int:
        """Return the slot of a position behind the gap, or of the next one."""
        return position - self.num_dropped * self.block_size

    def places(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the block, and the row in it, of each position from `start` to before `stop`, all behind the gap."""
        for position in range(start, stop):
            index, row = divmod(self.slot(position), self.block_size)
            yield self.blocks[index], row

    def num_blocks_for(self, length: int) -> int:
        """Return how many blocks a sequence of `length` tokens has, dropped ones included."""
        return -(-length // self.block_size)

    def most_held(self, length: int) -> int:
        """Return how many blocks a sequence that grows to `length` tokens, one at a time, holds at most."""
        return kept_rows(length, self.window, self.sinks, block_size=self.block_size) // self.block_size

    def open_block(self, length: int) -> int | None:
        """Return the block that takes the next token of a sequence of `length` tokens, None if that is a new one."""
        return self.blocks[-1] if length % self.block_size else None

    def places_needed(self, length: int) -> tuple[range, range]:
        """Return the places of the blocks that the next token of a sequence of `length` tokens sees rows of.

        The sinks' first, then those of the window; a place counts all blocks, dropped ones included.
        """
        end = self.num_blocks_for(length)
        if self.window is None:
            return range(0), range(end)
        first = max(0, length - self.window + 1) // self.block_size
        return range(min(self.num_sink_blocks, end, first)), range(first, end)

    def grow(self, num_blocks: int) -> None:
        """Append new blocks."""
        self.blocks.extend(self.ledger.allocate(self) for _ in range(num_blocks))

    def shrink(self, num_blocks: int) -> None:
        """Release the last blocks."""
        for _ in range(num_blocks):
            self.ledger.release(self.blocks.pop(), self)

    def share(self, blocks: Iterable[int], num_dropped: int) -> None:
        """Hold these blocks, which others hold, as all that is left of a sequence; the table must be empty."""
        for block in blocks:
            self.ledger.retain(block, self)
            self.blocks.append(block)
        self.num_dropped = num_dropped

    def block_at(self, place: int) -> int | None:
        """Return the block at a place, dropped ones counted; None where it was dropped."""
        index = self._index(place)
        return None if index is None else self.blocks[index]

    def exchange(self, place: int, block: int) -> None:
        """Put a block that others hold, with the same rows, where another is that was not dropped."""
        index = self._index(place)
        assert index is not None
        self.ledger.retain(block, self)
        self.ledger.release(self.blocks[index], self)
        self.blocks[index] = block

    def replace_last(self) -> None:
        """Put a new block in the place of the last one and release that."""
        old = self.blocks[-1]
        self.blocks[-1] = self.ledger.allocate(self)
        self.ledger.release(old, self)

    def restore_last(self, old: int) -> None:
        """Take `replace_last` back; somebody must still hold `old`."""
        self.ledger.retain(old, self)
        self.ledger.release(self.blocks[-1], self)
        self.blocks[-1] = old

    def drop_left_behind(self, length: int) -> None:
        """Release the blocks that the newest of `length` tokens does not see any more."""
        if self.window is None:
            return
        first = self.num_sink_blocks
        num_dropped = max(0, (length - self.window) // self.block_size - first)
        for _ in range(num_dropped - self.num_dropped):
            self.ledger.release(self.blocks.pop(first), self)
        self.num_dropped = max(num_dropped, self.num_dropped)

    def holds(self, length: int) -> bool:
        """Whether the rows that a sequence shortened to `length` tokens still needs are all here."""
        if self.window is None or self.num_dropped == 0:
            return True
        in_sink_blocks = length <= self.num_sink_blocks * self.block_size
        return in_sink_blocks or length - self.window + 1 >= self.first_held

    def shorten(self, length: int) -> None:
        """Release the blocks behind the first `length` tokens, whose rows it must hold."""
        if length < self.first_held:
            self.shrink(len(self.blocks) - self.num_sink_blocks)
            self.num_dropped = 0
        self.shrink(len(self.blocks) + self.num_dropped - self.num_blocks_for(length))

    def fork(self) -> "BlockTable":
        """Return a table of the same blocks, which both hold then."""
        other = BlockTable(self.ledger, self.block_size, self.window, self.sinks)
        other.share(self.blocks, self.num_dropped)
        return other

    def _index(self, place: int) -> int | None:
        """Return where the block of a place is among those held, None where it was dropped."""
        if place < self.num_sink_blocks:
            return place
        index = place - self.num_dropped
        return None if index < self.num_sink_blocks else index

    def check(self, length: int) -> None:
        """Check that there are as many blocks as a sequence of `length` tokens has, less those let go."""
        expected = self.num_blocks_for(length) - self.num_dropped
        assert len(self.blocks) == expected, f"{len(self.blocks)} blocks for {length} tokens; expected {expected}"
