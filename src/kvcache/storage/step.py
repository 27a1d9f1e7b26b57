"""One step of a batch of sequences: reserve blocks, append and attend layer by layer, commit.

Whatever can fail for want of room fails in reserving, before anything has changed. Until the commit, lengths stay as
they were and tables know the way back: a step that is left by an exception never happened.
"""

from array import array
from functools import cached_property
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, Unpack, overload

import torch

from kvcache.attention.arguments import ScoreOptions, attention_arguments, check_head_groups, check_scores
from kvcache.attention.dispatch import checked_attention
from kvcache.checks import check_bool, check_int, check_tensor
from kvcache.errors import InvalidTypeError, InvalidValueError
from kvcache.storage.packing import PackedTokens
from kvcache.storage.reservation import Reservation, planned
from kvcache.storage.sequence import Sequence
from kvcache.storage.specs import LayerSpec
from kvcache.storage.tokens import TokenIds, check_tokens

if TYPE_CHECKING:
    from kvcache.storage.pool import BlockPool


class KindRows(NamedTuple):
    """Where the new tokens' rows go in the layers of one kind, and what their queries may see."""

    blocks: tuple[int, ...]  # (N,)
    rows: tuple[int, ...]  # (N,), in those blocks
    tables: "list[array[int]]"  # the blocks of each sequence
    lengths: list[int]  # (B,), in slots
    window: int | None
    sinks: int


class StepRows(NamedTuple):
    """What a kernel needs that appends and attends in all layers itself, as plain numbers."""

    ids: list[int]  # (N,)
    positions: list[int]  # (N,)
    firsts: list[int]  # as of `PackedTokens`
    kinds: dict[str, KindRows]


class Step:
    """New tokens for some sequences of a pool; made by `BlockPool.step`; `BlockPool` shows how to use it.

    The tokens of all sequences, N in all, lie one behind the other in the order of the sequences, without padding.

    Attributes:
        sequences: as given.
        num_tokens: how many new tokens each of them has.
        reservations: what was reserved for each kind of layers.
    """

    def __init__(self, pool: "BlockPool", sequences: list[Sequence], tokens: list[TokenIds] | torch.Tensor) -> None:
        self.pool = pool
        self.sequences = _check_sequences(pool, sequences)
        self._ids = check_tokens(tokens, len(self.sequences))
        self.num_tokens = [len(ids) for ids in self._ids]
        self._packing = PackedTokens(
            [sequence.seq_len for sequence in self.sequences],
            self.num_tokens,
            {kind: [sequence.table(kind) for sequence in self.sequences] for kind in pool.spec.kinds},
            pool.device,
        )
        self.reservations: dict[str, Reservation] = {}
        self._appended: set[int] = set()
        try:
            self._reserve()
        except BaseException:
            self._undo()
            raise
        for sequence in self.sequences:
            sequence.open_step = self

    @property
    def is_open(self) -> bool:
        """Whether the step is neither committed nor aborted."""
        return self.sequences[0].open_step is self

    @cached_property
    @torch.inference_mode(False)
    def tokens(self) -> torch.Tensor:
        """The ids of the new tokens, int64 (1, N): what the model's embedding takes."""
        return torch.tensor([list(chain.from_iterable(self._ids))], device=self.pool.device)

    @property
    def positions(self) -> torch.Tensor:
        """The position of each new token in its sequence, int64 (1, N): for rotary or learned embeddings."""
        return self._packing.positions

    @property
    def last(self) -> torch.Tensor:
        """The place of each sequence's last new token among all N, int64 (B,): where its next token's logits are."""
        return self._packing.last

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store one layer's keys and values of all new tokens; `attend` then sees them.

        Args:
            layer: index of the layer in the pool's spec.
            k: (1, Hkv, N, D), any floating dtype (cast by value), on the pool's device.
            v: (1, Hkv, N, Dv), likewise.

        Raises:
            InvalidValueError, InvalidTypeError: a shape, dtype or device does not fit, the layer is appended already,
                or the step is over. Nothing has been stored.
        """
        layer, spec = self._check_layer(layer)
        if layer in self._appended:
            raise InvalidValueError(f"layer {layer} is appended already; expected each layer once in a step")
        k_dim, v_dim = spec.head_dims
        shape = (1, spec.num_heads, self._packing.num_tokens)
        check_tensor("k", k, (*shape, k_dim), "(1, Hkv, N, D)", self.pool.device)
        check_tensor("v", v, (*shape, v_dim), "(1, Hkv, N, Dv)", self.pool.device)
        store = self.pool.stores[layer]
        store.scatter(k, v, *self._packing.targets(spec.kind))
        self._appended.add(layer)

    @overload
    def attend(
        self, layer: int, q: torch.Tensor, *, return_lse: Literal[False] = ..., **options: Unpack[ScoreOptions]
    ) -> torch.Tensor: ...
    @overload
    def attend(
        self, layer: int, q: torch.Tensor, *, return_lse: Literal[True], **options: Unpack[ScoreOptions]
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def attend(
        self, layer: int, q: torch.Tensor, *, return_lse: bool, **options: Unpack[ScoreOptions]
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sink_logits: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend the queries of all new tokens in one layer, each over its own sequence up to itself.

        Args:
            layer: index of the layer, which must be appended.
            q: (1, H, N, D) with H a multiple of the layer's Hkv; any floating dtype.
            scale: what scores are multiplied with; default 1 / sqrt(D).
            softcap: scores become `softcap * tanh(scores / softcap)`.
            sink_logits: (H,), one more logit a head without a value.
            return_lse: also return the log-sum-exp (1, H, N).

        Returns:
            The output (1, H, N, Dv) in q's dtype, or a pair of it and the log-sum-exp. No gradient flows into the
            pool; it does flow into `q`.

        Raises:
            InvalidValueError, InvalidTypeError: a shape, dtype, device or value does not fit, the layer is not
                appended yet, or the step is over.
        """
        layer, spec = self._check_layer(layer)
        if layer not in self._appended:
            raise InvalidValueError(f"layer {layer} is not appended yet; append its keys and values first")
        check_bool("return_lse", return_lse)
        check_tensor("q", q, (1, None, self._packing.num_tokens, spec.head_dim), "(1, H, N, D)", self.pool.device)
        check_head_groups(q.shape[1], spec.num_heads)
        scale, softcap = check_scores(q, scale, softcap, sink_logits)
        store = self.pool.stores[layer]
        k, v = store.all_blocks
        results = []
        for queries, (block_table, lengths) in zip(
            self._packing.unpacked(q), self._packing.sources(spec.kind), strict=True
        ):
            arguments = attention_arguments(
                queries,
                k,
                v,
                store.block_size,
                block_table,
                lengths,
                None,
                spec.window,
                spec.sinks,
                scale,
                softcap,
                sink_logits,
                return_lse,
            )
            results.append(checked_attention(arguments))
        outputs = self._packing.packed([output for output, _ in results])
        return (
            (outputs, self._packing.packed([lse for _, lse in results if lse is not None])) if return_lse else outputs
        )

    @property
    def largest_id(self) -> int:
        """The largest id of the new tokens."""
        return max(map(max, self._ids))

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, the new ones included."""
        return max(self._packing.ends)

    def take_over(self) -> StepRows:
        """Return what a kernel for all layers needs; all layers count as appended from now on.

        Whoever takes over writes all rows, or lets the step be aborted.

        Raises:
            InvalidValueError: a layer is appended already, or the step is over.
        """
        self.check_open()
        if self._appended:
            raise InvalidValueError(f"layers {sorted(self._appended)} are appended already; expected none")
        packing, spec = self._packing, self.pool.spec
        kinds = {}
        for kind, tables in packing.tables.items():
            blocks, rows = zip(*packing.places(kind), strict=True)
            slots = [table.slot(end) for table, end in zip(tables, packing.ends, strict=True)]
            kinds[kind] = KindRows(blocks, rows, [table.blocks for table in tables], slots, *spec.rule(kind))
        self._appended.update(range(len(self.pool.stores)))
        return StepRows(list(chain.from_iterable(self._ids)), packing.plain_positions, packing.firsts, kinds)

    def commit(self, keep: list[int] | None = None) -> None:
        """Let the new tokens belong to their sequences; windows give back the blocks that they have left.

        Args:
            keep: how many of each sequence's new tokens stay, the first ones; default all. So what speculation
                proposed and nobody accepted never becomes part of a sequence.

        Raises:
            InvalidValueError, InvalidTypeError: a layer is not appended, `keep` does not fit, or the step is over.
                Nothing has changed.
        """
        self.check_open()
        if missing := sorted(set(range(len(self.pool.stores))) - self._appended):
            raise InvalidValueError(f"layers {missing} are not appended; expected every layer before the commit")
        kept = self._check_keep(keep)
        for reservation in self.reservations.values():
            reservation.settle()
        self._close()
        for sequence, ids, count in zip(self.sequences, self._ids, kept, strict=True):
            sequence.extend(ids[:count], num_rejected=len(ids) - count)
        try:
            if self.pool.observer is not None:
                self.pool.observer.committed(self.sequences)
        finally:
            for sequence in self.sequences:
                sequence.drop_left_behind()

    def abort(self) -> None:
        """Leave everything as it was before the step.

        Raises:
            InvalidValueError: the step is over.
        """
        self.check_open()
        self._undo()
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.is_open:
            return
        if error is not None:
            self.abort()
            return
        try:
            self.commit()
        finally:
            if self.is_open:
                self.abort()

    def _reserve(self) -> None:
        pool = self.pool
        plans = {  # of all kinds first: what makes room lets go of blocks, which cannot be undone
            kind: planned(kind, zip(tables, self._packing.lengths, self.num_tokens, strict=True))
            for kind, tables in self._packing.tables.items()
        }
        for kind, plan in plans.items():
            self.reservations[kind] = Reservation(plan)
        for kind, reservation in self.reservations.items():
            if reservation.copies:
                sources, targets = zip(*reservation.copies, strict=True)
                for layer in pool.spec.kinds[kind]:
                    pool.stores[layer].copy_blocks(sources, targets)

    def _undo(self) -> None:
        for reservation in self.reservations.values():
            reservation.undo()

    def _close(self) -> None:
        for sequence in self.sequences:
            sequence.open_step = None

    def check_open(self) -> None:
        """Check that the step is neither committed nor aborted."""
        if not self.is_open:
            raise InvalidValueError("the step is over; start another with pool.step(...)")

    def _check_layer(self, layer: int) -> tuple[int, LayerSpec]:
        self.check_open()
        layers = self.pool.spec.layers
        layer = check_int("layer", layer, minimum=0)
        if layer >= len(layers):
            raise InvalidValueError(f"layer is {layer}; expected one of the {len(layers)} layers, counted from 0")
        return layer, layers[layer]

    def _check_keep(self, keep: Any) -> list[int]:
        if keep is None:
            return self.num_tokens
        if not isinstance(keep, (list, tuple)):
            raise InvalidTypeError(f"keep is a {type(keep).__name__}; expected a list of one number a sequence")
        kept = [check_int(f"keep[{index}]", count, minimum=0) for index, count in enumerate(keep)]
        if len(kept) != len(self.num_tokens) or any(map(int.__gt__, kept, self.num_tokens)):
            raise InvalidValueError(f"keep is {kept}; expected a number for each sequence, at most {self.num_tokens}")
        return kept


def _check_sequences(pool: "BlockPool", sequences: Any) -> list[Sequence]:
    if not isinstance(sequences, (list, tuple)):
        raise InvalidTypeError(f"sequences is a {type(sequences).__name__}; expected a list of Sequence")
    if not sequences:
        raise InvalidValueError("sequences is empty; expected at least one Sequence")
    seen: set[Sequence] = set()
    for index, sequence in enumerate(sequences):
        if not isinstance(sequence, Sequence):
            raise InvalidTypeError(f"sequences[{index}] is a {type(sequence).__name__}; expected a Sequence")
        if sequence.pool is not pool:
            raise InvalidValueError(f"sequences[{index}] belongs to another pool; expected one that this pool made")
        sequence.check_usable(f"sequences[{index}]")
        if sequence in seen:
            raise InvalidValueError(f"sequences[{index}] is in the step twice; expected each sequence once")
        seen.add(sequence)
    return list(sequences)
