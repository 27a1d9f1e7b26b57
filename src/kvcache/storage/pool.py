"""Keys and values of many sequences in blocks of one size, shared where sequences share their past.

    pool        one BlockLedger a kind of layers: who holds which block       pure bookkeeping
     |          one BlockStore a layer: the rows of all blocks                tensors
    Sequence    one BlockTable a kind: its blocks, in order
     |
    Step        new tokens for some sequences: reserve, append and attend layer by layer, commit

A block id names the same rows in every layer of its kind.
"""

import copy
from array import array
from collections.abc import Mapping
from typing import Protocol

import torch

from kvcache.checks import check_device, check_int
from kvcache.errors import InvalidTypeError, InvalidValueError
from kvcache.storage.blocks import BlockStore
from kvcache.storage.codecs import StorageLike, check_storage
from kvcache.storage.ledger import BlockLedger, Keeper
from kvcache.storage.sequence import Sequence
from kvcache.storage.specs import CacheSpec
from kvcache.storage.step import Step
from kvcache.storage.table import BlockTable
from kvcache.storage.tokens import TokenIds


class Observer(Protocol):
    """Who follows what becomes of a pool's blocks; see `kvcache.prefix`."""

    def committed(self, sequences: list[Sequence]) -> None:
        """Look at sequences whose new tokens are stored, before windows give back what they have left."""

    def check(self) -> None:
        """Check the observer's own books."""


class BlockPool:
    """A preallocated store for the keys and values of all layers of one model, for any number of sequences.

    Sequences grow block by block and nothing stored is ever moved. `Sequence.fork` shares all blocks, the open one
    too; a step that must write a block which others hold takes a copy of that one first. Sliding layers give blocks
    back once no query sees them any more.

    Args:
        spec: the layers, for instance `CacheSpec.from_config(model.config)`.
        num_blocks: blocks of each kind of layers, >= 1; or one number a kind, as in {"full": 100, "sliding": 20}.
        block_size: token rows of a block, >= 1; 64 is read as fast as larger ones (docs/speed.md).
        storage: how rows are kept, as in `KVCache`: "float32", "bfloat16", "int8", "int8/int4" ...
        device: where the blocks are.

    Attributes:
        spec, block_size, device: as given.
        stores: one `BlockStore` a layer, with the tensors.

    Raises:
        InvalidValueError, InvalidTypeError: an argument is out of range or of the wrong kind.

    A pool, its sequences and steps belong to one thread at a time.

    >>> from kvcache import BlockPool, CacheSpec, LayerSpec
    >>> pool = BlockPool(CacheSpec([LayerSpec(num_heads=2, head_dim=8)]), num_blocks=8, block_size=4)
    >>> text = pool.new_sequence()
    >>> with pool.step([text], [[11, 12, 13, 14, 15, 16]]) as step:  # leaving the block commits
    ...     step.append(0, torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8))
    ...     output = step.attend(0, torch.randn(1, 4, 6, 8))
    >>> branch = text.fork()
    >>> with pool.step([text, branch], [[17], [18, 19]]) as step:  # 3 tokens, one behind the other
    ...     step.append(0, torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8))
    ...     output = step.attend(0, torch.randn(1, 4, 3, 8))
    >>> text.blocks(), branch.blocks()  # block 0 is shared; 1 was, until one of the two wrote
    ([0, 2], [0, 1])
    """

    def __init__(
        self,
        spec: CacheSpec,
        num_blocks: int | Mapping[str, int],
        block_size: int = 64,
        storage: StorageLike = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if not isinstance(spec, CacheSpec):
            raise InvalidTypeError(f"spec is a {type(spec).__name__}; expected a CacheSpec")
        self.spec = spec
        self.block_size = check_int("block_size", block_size, minimum=1)
        self.device = check_device("device", device)
        counts = spec.blocks(num_blocks)
        self._storage = check_storage("storage", storage)
        self.stores = tuple(
            BlockStore(layer, counts[layer.kind], self.block_size, self._storage, self.device) for layer in spec.layers
        )
        self._ledgers = {kind: BlockLedger(count) for kind, count in counts.items()}
        self._sequences: dict[Sequence, None] = {}
        self.observer: Observer | None = None

    @property
    def storage(self) -> str:
        """How rows are kept: a name, or the keys' and the values', as in "int8/int4"."""
        return self._storage.name

    @property
    def num_blocks(self) -> dict[str, int]:
        """Blocks of each kind of layers."""
        return {kind: ledger.num_blocks for kind, ledger in self._ledgers.items()}

    @property
    def num_free(self) -> dict[str, int]:
        """Free blocks of each kind of layers."""
        return {kind: ledger.num_free for kind, ledger in self._ledgers.items()}

    @property
    def num_available(self) -> dict[str, int]:
        """Blocks of each kind that a step can take: free ones, and those that only a `PrefixCache` still holds."""
        return {kind: ledger.num_available for kind, ledger in self._ledgers.items()}

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences that are not freed."""
        return list(self._sequences)

    @property
    def open_steps(self) -> list[Step]:
        """The steps that are neither committed nor aborted, in the order of their oldest sequences."""
        return list(dict.fromkeys(seq.open_step for seq in self._sequences if seq.open_step is not None))

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks, used and free; what `spec.nbytes` says."""
        return sum(store.nbytes for store in self.stores)

    def num_holders(self, block: int, kind: str = "full") -> int:
        """Return how many hold a block of this kind: sequences, an open step that copied from it, a `PrefixCache`.

        Raises:
            InvalidValueError, InvalidTypeError: there is no such block, or no such kind.
        """
        self.spec.check_kind(kind)
        ledger = self._ledgers[kind]
        return ledger.num_holders(ledger.check_block(block))

    def new_sequence(self) -> Sequence:
        """Return an empty sequence; it takes its first block in a step."""
        return self.adopt(self.new_tables(), array("q"))

    def step(self, sequences: list[Sequence], tokens: list[TokenIds] | torch.Tensor) -> Step:
        """Reserve room for new tokens of some sequences, and return the step that stores and attends them.

        Used in a `with` statement it commits at the end; left by an exception, or with `Step.abort`, it never
        happened. Until then nothing else can be done with its sequences.

        Args:
            sequences: of this pool, each once.
            tokens: for each sequence the ids of its new tokens, at least one: a list of lists or of integer tensors
                (T,), or one integer tensor (B, T).

        Raises:
            OutOfBlocksError: too few blocks are free, or held by a `PrefixCache` alone. Nothing has changed.
            InvalidValueError, InvalidTypeError: a sequence is freed, in an open step, of another pool or named twice;
                ids are missing, or something is no token id. Nothing has changed.
        """
        return Step(self, sequences, tokens)

    def check(self) -> None:
        """Check that every block is either free or held by those that name it, and by nobody else.

        Raises:
            AssertionError: it is not, which is a fault of this package.
        """
        for kind, ledger in self._ledgers.items():
            tables = [sequence.table(kind) for sequence in self._sequences]
            claims = [claim for step in self.open_steps for claim in step.reservations[kind].claims]
            ledger.check([*((table, table.blocks) for table in tables), *claims])
        for sequence in self._sequences:
            sequence.check()
        if self.observer is not None:
            self.observer.check()

    def observe(self, observer: Observer, keepers: Mapping[str, Keeper]) -> None:
        """Let somebody know of every commit, and keep blocks of each kind beyond their use.

        Raises:
            InvalidValueError: the pool has an observer already.
        """
        if self.observer is not None:
            raise InvalidValueError("the pool has a PrefixCache already; use that one, or make another pool for this")
        self.observer = observer
        for kind, keeper in keepers.items():
            self._ledgers[kind].set_keeper(keeper)

    def ledger(self, kind: str) -> BlockLedger:
        """Return who holds which block of one kind."""
        return self._ledgers[kind]

    def new_tables(self) -> dict[str, BlockTable]:
        """Return an empty table for each kind."""
        return {
            kind: BlockTable(ledger, self.block_size, *self.spec.rule(kind)) for kind, ledger in self._ledgers.items()
        }

    def adopt(self, tables: dict[str, BlockTable], tokens: "array[int]") -> Sequence:
        """Return a new sequence of the pool that owns these tables."""
        sequence = Sequence(self, tables, tokens)
        self._sequences[sequence] = None
        return sequence

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence that holds nothing any more."""
        del self._sequences[sequence]

    def __copy__(self) -> "BlockPool":
        return copy.deepcopy(self)  # sharing the blocks would let one write over the other's rows

    def __repr__(self) -> str:
        used = ", ".join(
            f"{ledger.num_blocks - ledger.num_free} of {ledger.num_blocks} {kind} blocks used"
            for kind, ledger in self._ledgers.items()
        )
        return (
            f"BlockPool({len(self.stores)} layers, block_size={self.block_size}, storage={self.storage}, "
            f"device={self.device}, {used}, {len(self._sequences)} sequences)"
        )
