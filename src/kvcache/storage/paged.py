"""A cache that keeps every token in small blocks, which rows of the batch with the same past share.

    row of the batch      0        1                   block table (B, M)
    position  0 .. 3      0        0    shared         0  1  2
    position  4 .. 7      1        1    shared         0  1  3
    position  8 .. 10     2        3    each its own

Beams are the case for it: repeating or reordering rows copies block tables, not keys and values. A row that must write
into a block which others hold takes a copy of that one first, the open block included. Forks are the other case: caches
of their own whose tables name the same blocks.
"""

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

import torch

from kvcache.attention.gather import join_blocks
from kvcache.checks import check_device, check_int
from kvcache.errors import InvalidValueError
from kvcache.storage.codecs import StorageLike
from kvcache.storage.family import CacheFamily
from kvcache.storage.layer import LayerCache, VisibleRows
from kvcache.storage.ledger import BlockLedger
from kvcache.storage.reservation import Request, Reservation, num_blocks_needed, planned
from kvcache.storage.table import BlockTable


class PagedCache(LayerCache):
    """Keys and values of one layer in blocks of `block_size` tokens, shared by rows of the batch with the same past.

    Blocks are added as tokens come, a quarter more at a time than there are, so that nothing need be known about
    lengths beforehand. `repeat`, `select` and `reorder` move no row: four beams over a prompt hold it once, and each
    the blocks that it wrote since. `fork` moves no row either. Blocks that nobody holds any more are used again.

    Args:
        batch_size: rows of the batch, B >= 1.
        num_heads: key/value heads, Hkv >= 1.
        head_dim: head size of the keys, D >= 1.
        block_size: tokens of a block, >= 1; 64 is read as fast as larger ones.
        dtype: what comes out, a floating torch dtype or its name.
        device: where the blocks are.
        v_head_dim: head size of the values, Dv; default D.
        storage: how rows are kept, as in `KVCache`; default `dtype`.
        max_seq_len: tokens that may be stored, >= 0; default None: any number.

    Attributes:
        k_cache, v_cache: the blocks (num_blocks, num_heads, block_size, head_dim), used ones and free ones, with a
            row's bytes (uint8) in the place of head_dim for int8 and int4. They are other tensors once it has grown.
        max_seq_len: as given.

    Raises:
        InvalidValueError, InvalidTypeError: an argument is out of range or of the wrong kind.

    >>> cache = PagedCache(batch_size=1, num_heads=2, head_dim=4, block_size=4)
    >>> cache.append(torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 4))  # the prompt: 6 tokens
    >>> cache.repeat(2)  # two beams
    >>> cache.append(torch.randn(2, 2, 1, 4), torch.randn(2, 2, 1, 4))
    >>> cache.blocks(0), cache.blocks(1)  # block 0 is shared; 1 was, until both wrote
    ([0, 2], [0, 1])
    >>> cache.attend(torch.randn(2, 6, 1, 4)).shape
    torch.Size([2, 6, 1, 4])
    """

    size_names = ("block_size", "max_seq_len")

    def __init__(
        self,
        batch_size: int,
        num_heads: int,
        head_dim: int,
        block_size: int = 64,
        dtype: torch.dtype | str = torch.float32,
        device: torch.device | str = "cpu",
        *,
        v_head_dim: int | None = None,
        storage: StorageLike | None = None,
        max_seq_len: int | None = None,
    ) -> None:
        block_size = check_int("block_size", block_size, minimum=1)
        self.max_seq_len = None if max_seq_len is None else check_int("max_seq_len", max_seq_len, minimum=0)
        super().__init__(batch_size, num_heads, head_dim, block_size, dtype, device, v_head_dim, storage, num_blocks=0)
        self._ledger = BlockLedger(num_blocks=0)
        self._family: CacheFamily | None = None  # None: this is the only cache over its blocks
        self._leave: Callable[[], object] | None = None
        self._tables: list[BlockTable] = []
        self._use([BlockTable(self._ledger, block_size, window=None, sinks=0) for _ in range(batch_size)])

    @property
    def batch_size(self) -> int:
        """Rows of the batch, B."""
        return len(self._tables)

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self._store.block_size

    @property
    def num_blocks(self) -> int:
        """Blocks that there are, used and free, those of its forks included."""
        return self._store.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that no row of the batch holds, here or in a fork."""
        self._settle()
        return self._ledger.num_free

    @property
    def stored_nbytes(self) -> int:
        """Bytes of the rows that hold tokens, those of a block counted once, however many rows of the batch hold it.

        What the batch shares makes it less than `stored_len * token_nbytes`. What a fork holds too counts for each.
        """
        if self._seq_len == 0:
            return 0
        num_open = len({table.blocks[-1] for table in self._tables})
        num_used = len(self._held)
        free_rows = -self._seq_len % self.block_size  # of each of the last blocks
        return (num_used * self.block_size - num_open * free_rows) * self._store.layer.token_nbytes(self._store.storage)

    def blocks(self, row: int) -> list[int]:
        """Return the ids of the blocks that a row of the batch holds, in order: a snapshot.

        Raises:
            InvalidValueError, InvalidTypeError: there is no such row.
        """
        if check_int("row", row, minimum=0) >= self.batch_size:
            raise InvalidValueError(f"row is {row}; expected one of the {self.batch_size}, counted from 0")
        return self._tables[row].blocks.tolist()

    def num_holders(self, block: int) -> int:
        """Return how many rows of the batch hold a block, here and in forks.

        Raises:
            InvalidValueError, InvalidTypeError: there is no such block.
        """
        self._settle()
        return self._ledger.num_holders(self._ledger.check_block(block))

    def append(self, k_new: torch.Tensor, v_new: torch.Tensor) -> None:
        """Store the keys and values of the next T tokens; `attend` then sees them.

        Args:
            k_new: (B, Hkv, T, D), any floating dtype (cast by value), on the cache's device. T may be 0.
            v_new: (B, Hkv, T, Dv), likewise.

        Raises:
            CacheFullError: there is a `max_seq_len` and fewer than T tokens fit. Nothing has been stored then.
            InvalidValueError, InvalidTypeError: a shape, dtype or device does not fit; nothing has been stored.
        """
        num_tokens = self._check_new_rows(k_new, v_new)
        length = self._seq_len + num_tokens
        if length <= self._writable:
            self._store.scatter(k_new, v_new, *self._places(num_tokens))
        elif self.max_seq_len is not None and length > self.max_seq_len:
            raise self._full_error(length, self.max_seq_len)
        elif num_tokens:
            with self._reserved(length):
                self._store.scatter(k_new, v_new, *self._places(num_tokens))
        self._seq_len = length

    def update(self, k_new: torch.Tensor, v_new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the keys and values of the next T tokens and return all of them; takes and raises what `append` does.

        This is the slow way, for attention that needs them in one piece: every row is copied at every step. `append`
        and `attend` read them where they are.

        Returns:
            Contiguous copies of all keys (B, Hkv, seq_len, D) and values (B, Hkv, seq_len, Dv), in `dtype`.
        """
        self.append(k_new, v_new)
        k, v = self.decoded_rows()
        return k.contiguous(), v.contiguous()

    def stored_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of all keys (B, Hkv, seq_len, width) and values, as they are stored."""
        return self._joined(self._store.k), self._joined(self._store.v)

    def to(self, device: torch.device | str) -> Self:
        """Move the blocks to `device`, in place, and return the cache itself (as `torch.nn.Module.to` does).

        Forks stay where they are: the cache takes copies of the blocks that it holds first.
        """
        self._settle()
        if self._family is not None and len(self._family) > 1 and check_device("device", device) != self.device:
            assert self._leave is not None
            own = self.copy()
            self._leave()
            self._store, self._ledger, self._tables = own._store, own._ledger, own._tables
            self._family = self._leave = None
        super().to(device)
        self._use(self._tables)
        return self

    def fork(self) -> Self:
        """Return an independent cache with the same content, whose rows of the batch share all blocks with this one's.

        No row is copied until one of the two writes a block that the other holds too. A fork that is let go gives its
        blocks back. A cache and its forks are one thing for threads: use them from one at a time.

        >>> cache = PagedCache(batch_size=1, num_heads=2, head_dim=4, block_size=4)
        >>> cache.append(torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 4))
        >>> other = cache.fork()
        >>> other.append(torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4))
        >>> cache.blocks(0), other.blocks(0), cache.seq_len
        ([0, 1], [0, 2], 6)
        """
        other = self._empty()
        other._store, other._ledger, other._seq_len = self._store, self._ledger, self._seq_len
        other._use([table.fork() for table in self._tables])
        self._writable = 0
        if self._family is None:
            self._family = CacheFamily()
            self._leave = self._family.join(self, self._tables)
        other._family = self._family
        other._leave = self._family.join(other, other._tables)
        return other

    def copy(self) -> Self:
        """Return an independent cache with the same content, which shares blocks among its rows as this one does.

        It shares none with this one, and has no free ones.
        """
        held = self._held
        other = self._empty()
        other._store = self._store.picked(held)
        other._ledger.add(len(held))
        numbers: dict[int, int] = {}  # of the blocks there, by those here
        for table, theirs in zip(self._tables, other._tables, strict=True):
            for block in table.blocks:
                if block in numbers:
                    other._ledger.retain(numbers[block], theirs)
                else:
                    numbers[block] = other._ledger.allocate(theirs)
                theirs.blocks.append(numbers[block])
        other._seq_len = self._seq_len
        other._use(other._tables)
        return other

    def _empty(self) -> Self:
        """Return a cache of the same form without any block."""
        return type(self)(
            self.batch_size,
            self.num_heads,
            self.head_dim,
            self.block_size,
            self._dtype,
            self.device,
            v_head_dim=self.v_head_dim,
            storage=self._store.storage,
            max_seq_len=self.max_seq_len,
        )

    def check(self) -> None:
        """Check that every block is either free or held by those rows of the batch, here and in forks, that name it.

        Raises:
            AssertionError: it is not, which is a fault of this package.
        """
        self._settle()
        tables = self._tables if self._family is None else self._family.tables
        self._ledger.check((table, table.blocks) for table in tables)
        for table in self._tables:
            table.check(self._seq_len)
        assert self._ledger.num_blocks == self.num_blocks, f"{self._ledger.num_blocks} and {self.num_blocks} blocks"
        named = [table.blocks.tolist() for table in self._tables]
        assert self._read.block_table.tolist() == named, f"{self._read.block_table} says what tables do not: {named}"

    def _restore(self, k: torch.Tensor, v: torch.Tensor, seq_len: int) -> None:
        self._check_complete(k, seq_len, self.max_seq_len)
        self._shorten(0)
        if seq_len:
            with self._reserved(seq_len):
                self._store.place(k, v, *self._places(seq_len))
        self._seq_len = seq_len

    def _shorten(self, length: int) -> None:
        num_places = len(self._tables[0].blocks)
        for table in self._tables:
            table.shorten(length)
        if len(self._tables[0].blocks) < num_places:
            self._read.write(self._tables, num_places)
            self._writable = 0  # the block that is open now may be shared
        self._seq_len = length

    def _rebatch(self, index: torch.Tensor) -> None:
        left = dict(enumerate(self._tables))
        tables = [left.pop(row, None) or self._tables[row].fork() for row in index.tolist()]
        for table in left.values():
            table.shorten(0)
        self._use(tables)

    def _visible_rows(self, num_queries: int, starts: torch.Tensor | None) -> VisibleRows:
        read = self._read
        return VisibleRows(
            *self._store.all_blocks,
            starts,
            block_table=read.block_table,
            lengths=read.lengths.fill_(self._seq_len),
        )

    def _use(self, tables: list[BlockTable]) -> None:
        """Let these be the batch's tables."""
        self._tables[:] = tables  # in place, as the family has this list too
        self._read = _TableTensors(tables, self.device)
        # Up to this length tokens may be appended to blocks that each row of the batch holds alone; 0: not known.
        self._writable = 0

    @property
    def _held(self) -> list[int]:
        """The blocks that the rows of this batch hold, each once, in the order in which the tables name them."""
        return list(dict.fromkeys(block for table in self._tables for block in table.blocks))

    def _settle(self) -> None:
        """Release what forks that are gone have left."""
        if self._family is not None:
            self._family.settle()

    def _joined(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return copies of the rows of all sequences out of blocks (num_blocks, Hkv, block_size, width)."""
        if self._seq_len == 0:
            return blocks.new_empty(self.batch_size, self.num_heads, 0, blocks.shape[3])
        return join_blocks(blocks, self._read.block_table)[:, :, : self._seq_len]

    def _places(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the block and the row in it of each new token, (B * T,) both, sequence by sequence."""
        read, start, block_size = self._read, self._seq_len, self.block_size
        if num_tokens == 1:
            return read.open_blocks, read.rows.fill_(start % block_size)
        positions = torch.arange(start, start + num_tokens, device=self.device)
        blocks = read.block_table.index_select(1, positions // block_size)
        return blocks.flatten(), (positions % block_size).repeat(self.batch_size)

    @contextmanager
    def _reserved(self, length: int) -> Iterator[None]:
        """Give each sequence blocks of its own for the tokens up to `length`, for good if they are written."""
        self._settle()
        requests: list[Request] = [(table, self._seq_len, length - self._seq_len) for table in self._tables]
        self._add_blocks(num_blocks_needed(requests) - self.num_free)
        first = self._seq_len // self.block_size  # the place of the first block that may change
        reservation = Reservation(planned("full", requests))
        try:
            if reservation.copies:
                self._store.copy_blocks(*zip(*reservation.copies, strict=True))
            self._read.write(self._tables, first)
            yield
        except BaseException:
            reservation.undo()
            self._read.write(self._tables, first)
            raise
        reservation.settle()
        room = len(self._tables[0].blocks) * self.block_size
        self._writable = room if self.max_seq_len is None else min(room, self.max_seq_len)

    def _add_blocks(self, missing: int) -> None:
        """Add as many blocks as are missing and some for later, but no more than tokens that fit can fill."""
        if missing <= 0:
            return
        num_blocks = self.num_blocks + max(missing, self.num_blocks // 4)
        if self.max_seq_len is not None:
            limit = self.batch_size * -(-self.max_seq_len // self.block_size)
            num_blocks = max(self.num_blocks + missing, min(num_blocks, limit))  # forks may need more
        self._store.grow(num_blocks)
        self._ledger.add(num_blocks - self._ledger.num_blocks)


class _TableTensors:
    """Tables of equal length as tensors, kept from step to step and written only where tables change.

    They are made outside of inference mode, whose tensors could not be written outside of it.
    """

    @torch.inference_mode(False)
    def __init__(self, tables: list[BlockTable], device: torch.device) -> None:
        self._entries = torch.full((len(tables), 0), -1, device=device)  # (B, at least M)
        self.lengths = torch.zeros(len(tables), dtype=torch.int64, device=device)  # written by who reads them next
        self.rows = torch.zeros_like(self.lengths)
        self.write(tables, 0)

    @torch.inference_mode(False)
    def write(self, tables: list[BlockTable], first: int) -> None:
        """Take over what the tables hold from place `first` on, and how many blocks they have."""
        num_places = len(tables[0].blocks)
        if num_places > self._entries.shape[1]:
            entries = self._entries.new_full((len(tables), num_places + num_places // 4), -1)
            entries[:, :first].copy_(self._entries[:, :first])
            self._entries = entries
        if first < num_places:
            changed = array("q")
            for table in tables:
                changed.extend(table.blocks[first:])
            self._entries[:, first:num_places].copy_(torch.frombuffer(changed, dtype=torch.int64).view(len(tables), -1))
        self.block_table = self._entries[:, :num_places]  # (B, M)
        self.open_blocks = self.block_table[:, -1:].flatten().contiguous()  # (B,)
