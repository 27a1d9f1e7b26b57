"""What a sequence must be, as plain lists.

What a layer keeps of a token follows from all that it may depend on: the tokens up to it and what they stand for, the
namespace and how often that was invalidated, and the weights at the time when it was run. So a row that is reused where
it must not be is another row.
"""

from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvcache import Sequence
from tests.prefix.state_rows import STATE_BITS

WINDOW, BLOCK_SIZE = 4, 3
PLAIN = (0, 0)  # instead of the number of a medium, from 1 on, and a place in it


class Origin(NamedTuple):
    """What all rows of a text depend on, as long as it may be shared."""

    namespace: int
    generation: int  # how often that was invalidated
    version: int  # of the weights


NOWHERE = Origin(-1, -1, -1)  # of a sequence that was not acquired


@dataclass(eq=False)
class Text:
    """What a sequence must be.

    Attributes:
        asked: the ids that it was acquired for.
        media: of each position that stands for something, the number of the medium and the place in it.
        states: in each layer, for every token a number that stands for all its rows depend on.
        num_unread: tokens that were found, and that no step has read.
        sure_from: the shortest length from which on windows are known to be kept behind a published beginning.
        has_gap: whether blocks may be missing among those that it publishes.
        shares: whether what its tokens stand for is known.
    """

    sequence: Sequence
    origin: Origin = NOWHERE
    asked: list[int] = field(default_factory=list)
    media: dict[int, tuple[int, int]] = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)
    states: list[list[int]] = field(default_factory=list)
    num_unread: int = 0
    sure_from: int = 0
    has_gap: bool = False
    shares: bool = True

    @property
    def content(self) -> tuple[tuple[int, tuple[int, int]], ...]:
        return content(self.ids, self.media)

    def run(self, layer: int, ids: AbstractSequence[int], version: int) -> list[int]:
        """Return the states of new tokens that are run with these weights."""
        past = self.states[layer]
        state = past[-1] if past else hash((layer, self.origin.namespace, self.origin.generation))
        states = []
        for position, token in enumerate(ids, len(past)):
            state = hash((state, version, token, self.media.get(position, PLAIN))) % (1 << STATE_BITS)
            states.append(state)
        return states

    def shorten(self, length: int) -> None:
        if length < len(self.ids):
            self.part_at(length)
        for values in (self.ids, *self.states):
            del values[length:]
        self.num_unread = min(self.num_unread, length)

    def part_at(self, length: int) -> None:
        """Take note that what comes behind the first `length` tokens may be another text."""
        if any(position >= length for position in self.media):
            self.shares = False

    def held(self, kind: str, count: int) -> list[int]:
        """Return which of the positions before `count` the sequence has rows of, in the order of its blocks."""
        gap = self._gap(kind)
        return [*range(min(gap.start, count)), *range(gap.stop, count)]

    def holds(self, kind: str, length: int) -> bool:
        """Whether of the first `length` tokens all rows are there that the next one sees."""
        sinks = range(min(self.sequence.table(kind).sinks, length))
        window = range(max(0, length - WINDOW + 1), length)
        return not any(position in self._gap(kind) for position in (*sinks, *window))

    def _gap(self, kind: str) -> range:
        table = self.sequence.table(kind)
        if not table.num_dropped:
            return range(0)
        first = table.num_sink_blocks * BLOCK_SIZE
        return range(first, first + table.num_dropped * BLOCK_SIZE)


def content(ids: AbstractSequence[int], media: dict[int, tuple[int, int]]) -> tuple[tuple[int, tuple[int, int]], ...]:
    return tuple((token, media.get(position, PLAIN)) for position, token in enumerate(ids))
