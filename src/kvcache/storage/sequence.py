"""One sequence of tokens in a pool: what it has seen, and one block table for each kind of layers."""

from array import array
from typing import TYPE_CHECKING, Protocol, Self

from kvcache.checks import check_int, check_up_to_seq_len
from kvcache.errors import InvalidValueError, RollbackError
from kvcache.storage.table import BlockTable

if TYPE_CHECKING:
    from kvcache.storage.pool import BlockPool
    from kvcache.storage.step import Step


class Lineage(Protocol):
    """What somebody remembers of where a sequence's blocks come from; see `kvcache.prefix`."""

    def fork(self, length: int) -> "Lineage":
        """Return what is to be remembered of a fork of so many tokens."""

    def shorten(self, length: int) -> None:
        """Take note that what comes behind the first `length` tokens may be another text from now on."""


class Sequence:
    """The tokens of one text, whose keys and values are in the blocks of a pool; made by `BlockPool.new_sequence`.

    It grows by a step of the pool. What is done to it here moves no row: forks share their blocks until one of them
    writes, and going back shortens tables. A `with` statement frees it at its end.
    """

    def __init__(self, pool: "BlockPool", tables: dict[str, BlockTable], tokens: "array[int]") -> None:
        self.pool = pool
        self.open_step: Step | None = None
        self.lineage: Lineage | None = None
        self._tables = tables
        self._tokens = tokens

    @property
    def seq_len(self) -> int:
        """Tokens seen so far, which is the position of the next one."""
        return len(self._tokens)

    @property
    def tokens(self) -> list[int]:
        """The ids of all tokens seen: a snapshot."""
        return self._tokens.tolist()

    @property
    def is_freed(self) -> bool:
        """Whether `free` was called."""
        return not self._tables

    def blocks(self, kind: str = "full") -> list[int]:
        """Return the ids of the blocks held for the layers of this kind, in order: a snapshot.

        A window's table begins with the blocks of its sinks; those that the window has left are not in it.

        Raises:
            InvalidValueError: the sequence is freed, or the pool has no layers of this kind.
        """
        self.check_usable()
        self.pool.spec.check_kind(kind)
        return self._tables[kind].blocks.tolist()

    def fork(self) -> "Sequence":
        """Return another sequence with the same past. No row is copied; see `BlockPool` for what is shared.

        Raises:
            InvalidValueError: the sequence is freed, or in an open step.
        """
        self.check_usable()
        other = self.pool.adopt({kind: table.fork() for kind, table in self._tables.items()}, self._tokens[:])
        other.lineage = None if self.lineage is None else self.lineage.fork(self.seq_len)
        return other

    def can_rollback(self, n: int) -> bool:
        """Whether the last `n` tokens can be dropped: there are that many, and windows hold what the rest needs.

        Right after a step that kept a token they do for n <= 1; and always for an n that leaves no more than the
        sinks' blocks hold.
        """
        self.check_usable()
        length = self.seq_len - check_int("n", n, minimum=0)
        return length >= 0 and all(table.holds(length) for table in self._tables.values())

    def rollback(self, n: int) -> None:
        """Drop the last `n` tokens. Blocks that are no longer needed are released.

        Raises:
            InvalidValueError: `n` is negative or larger than `seq_len`; the sequence is freed, or in an open step.
            RollbackError: a window no longer holds the rows that the shorter sequence needs. Nothing has changed.
        """
        self.check_usable()
        n = check_up_to_seq_len("n", n, self.seq_len)
        if not self.can_rollback(n):
            raise RollbackError(
                f"the last {n} of {self.seq_len} tokens cannot be dropped: a window has given back rows that a "
                f"sequence of {self.seq_len - n} tokens needs; fork the sequence before tokens that may have to go, "
                "or commit only those of a step that stay"
            )
        del self._tokens[self.seq_len - n :]
        for table in self._tables.values():
            table.shorten(self.seq_len)
        if n and self.lineage is not None:
            self.lineage.shorten(self.seq_len)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens; raises as `rollback` does."""
        self.rollback(self.seq_len - check_up_to_seq_len("length", length, self.seq_len))

    def free(self) -> None:
        """Release all blocks; nothing more can be done with the sequence, but `tokens` still tells what it held.

        Raises:
            InvalidValueError: it is freed already, or in an open step.
        """
        self.check_usable()
        for table in self._tables.values():
            table.shorten(0)
        self._tables = {}
        self.pool.forget(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if not self.is_freed:
            self.free()

    def table(self, kind: str) -> BlockTable:
        """Return the block table for the layers of one kind."""
        return self._tables[kind]

    def token_array(self, start: int, stop: int) -> "array[int]":
        """Return the ids of the tokens from `start` to before `stop`."""
        return self._tokens[start:stop]

    def extend(self, tokens: "array[int]", num_rejected: int) -> None:
        """Take new tokens whose rows are in the blocks, and give back the blocks behind them."""
        self._tokens.extend(tokens)
        for table in self._tables.values():
            table.shorten(self.seq_len)
        if num_rejected and self.lineage is not None:
            self.lineage.shorten(self.seq_len)

    def drop_left_behind(self) -> None:
        """Give back the blocks that windows have left."""
        for table in self._tables.values():
            table.drop_left_behind(self.seq_len)

    def check(self) -> None:
        """Check that tables are as long as the sequence; `BlockPool.check` checks who holds the blocks."""
        if self.open_step is None:
            for table in self._tables.values():
                table.check(self.seq_len)

    def check_usable(self, name: str = "the sequence") -> None:
        """Check that the sequence is not freed and in no open step."""
        if self.is_freed:
            raise InvalidValueError(f"{name} was freed; make another with pool.new_sequence()")
        if self.open_step is not None:
            raise InvalidValueError(f"{name} is in an open step; commit or abort that first")

    def __copy__(self) -> "Sequence":
        return self.fork()  # sharing the tables would let one write over the other's rows

    def __repr__(self) -> str:
        if self.is_freed:
            return "Sequence(freed)"
        blocks = ", ".join(f"{kind}={table.blocks.tolist()}" for kind, table in self._tables.items())
        return f"Sequence(seq_len={self.seq_len}, blocks: {blocks})"
