"""The tables of all caches that share blocks, and what those leave behind that are gone: no tensor here.

A cache that is let go gives its blocks back. Python may let it go at any moment, in the middle of another cache's act
and in any thread, so its tables are only put aside then, and whoever acts on the blocks next releases them.
"""

import weakref
from collections import deque
from collections.abc import Callable

from kvcache.storage.table import BlockTable


class CacheFamily:
    """The caches over the same blocks, each with the list of its tables."""

    def __init__(self) -> None:
        self._batches: list[list[BlockTable]] = []
        self._left: deque[list[BlockTable]] = deque()

    def __len__(self) -> int:
        """Caches that share the blocks, those that have left until `settle` included."""
        return len(self._batches)

    @property
    def tables(self) -> list[BlockTable]:
        """The tables of all of these."""
        return [table for batch in self._batches for table in batch]

    def join(self, cache: object, tables: list[BlockTable]) -> Callable[[], object]:
        """Add a cache whose tables stand in this list; it leaves when collected, or when what is returned is called."""
        self._batches.append(tables)
        leave = weakref.finalize(cache, self._left.append, tables)
        leave.atexit = False
        return leave

    def settle(self) -> None:
        """Release the blocks of those that have left."""
        while self._left:
            tables = self._left.popleft()
            self._batches = [batch for batch in self._batches if batch is not tables]
            for table in tables:
                table.shorten(0)
