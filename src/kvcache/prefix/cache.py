"""Texts that begin alike share the blocks of their beginning, as long as those are the rows they would compute.

    acquire(tokens)      namespace and weights -> root -> the longest path of nodes
                         -> a Sequence that holds the blocks of that path
    step.commit()        whole blocks become nodes of the PrefixTree; windows may leave them, the tree keeps them
    a block is needed    EvictionQueue: of the blocks that only the tree holds, the one that the policy says

What is kept is held in the pool's ledger like any sequence's blocks, so nobody writes it, and everybody reads it.
"""

import warnings
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch

from kvcache.checks import check_bool, check_int
from kvcache.errors import InvalidTypeError, InvalidValueError
from kvcache.prefix.content import Content, Media, check_media
from kvcache.prefix.eviction import Policy, least_recently_used
from kvcache.prefix.keys import block_key, encoded, root_key
from kvcache.prefix.lineage import Lineage
from kvcache.prefix.lookup import Lookup, LookupEnd, kept_path, usable_length
from kvcache.prefix.nodes import Node, Root
from kvcache.prefix.statistics import PrefixStatistics
from kvcache.prefix.tree import PrefixTree
from kvcache.prefix.weights import WeightsGuard
from kvcache.storage.pool import BlockPool
from kvcache.storage.sequence import Sequence
from kvcache.storage.tokens import TokenIds, check_token_ids


@dataclass(frozen=True)
class _Text:
    """A text that is looked up."""

    tokens: "array[int]"
    namespace: bytes
    media: tuple[Media, ...]
    limit: int  # of tokens to reuse


class PrefixCache:
    """Finds what sequences of a pool have computed for the first tokens of a text, so that only the rest is computed.

    `acquire` gives a sequence that already holds the longest beginning that is kept; a step runs the other tokens.
    Whole blocks are kept from the commit on in which they become whole, `publish` keeps the short last one too. Blocks
    that no sequence holds any more stay until a step needs room, then they go, by default the least recently used.

    Only what was computed for the same tokens, namespace and weights is found. The rows are those that the other
    sequence computed: equal to one's own but for rounding.

    Args:
        pool: whose sequences share; it can have one prefix cache.
        model: whose weights the rows are computed with. It is looked at at each look-up, and whenever blocks come to be
            kept: what was computed with other weights, adapters or settings is not found (see
            `kvcache.prefix.WeightsGuard` for what is seen). None: weights that change are the caller's to put into
            the namespace, or to `invalidate`.
        policy: which of the blocks that nobody uses goes first (`kvcache.prefix.eviction`).
        enabled: whether anything is found and kept; can be switched at any time.

    Raises:
        InvalidTypeError: `pool` is no `BlockPool`, `model` no module, `policy` no function.
        InvalidValueError: the pool has a prefix cache already.

    A pool, its sequences and its prefix cache belong to one thread at a time.

    >>> from kvcache import BlockPool, CacheSpec, LayerSpec, PrefixCache
    >>> pool = BlockPool(CacheSpec([LayerSpec(num_heads=1, head_dim=2)]), num_blocks=8, block_size=4)
    >>> prefixes = PrefixCache(pool)
    >>> def run(tokens):
    ...     sequence = prefixes.acquire(tokens)
    ...     new = tokens[sequence.seq_len :]
    ...     with pool.step([sequence], [new]) as step:
    ...         step.append(0, torch.ones(1, 1, len(new), 2), torch.ones(1, 1, len(new), 2))
    ...     prefixes.publish(sequence)
    ...     sequence.free()
    ...     return len(new)
    >>> run([1, 2, 3, 4, 5, 6]), run([1, 2, 3, 4, 5, 7, 8]), run([1, 2, 3, 4, 5, 7, 8])
    (6, 2, 1)
    """

    def __init__(
        self,
        pool: BlockPool,
        model: torch.nn.Module | None = None,
        *,
        policy: Policy = least_recently_used,
        enabled: bool = True,
    ) -> None:
        if not isinstance(pool, BlockPool):
            raise InvalidTypeError(f"pool is a {type(pool).__name__}; expected a BlockPool")
        if not callable(policy):
            raise InvalidTypeError(f"policy is a {type(policy).__name__}; expected a function of a kept block")
        self.pool = pool
        self.model = model
        self._enabled = check_bool("enabled", enabled)
        self._guard = None if model is None else WeightsGuard(model)
        self._tree = PrefixTree(pool, policy)
        # Of each namespace and state of the weights; a root lives as long as a node or a sequence is of it.
        self._roots: WeakValueDictionary[tuple[bytes, bytes], Root] = WeakValueDictionary()
        self._weights = b""
        self._num_changes = 0
        self._num_lookups = self._num_hits = self._num_tokens = self._num_reused = 0
        self._ends: Counter[LookupEnd] = Counter()
        pool.observe(self, self._tree.queues)

    @property
    def enabled(self) -> bool:
        """Whether anything is found and kept; can be set."""
        return self._enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self._enabled = check_bool("enabled", value)

    @property
    def statistics(self) -> PrefixStatistics:
        """What has been found, kept and evicted so far."""
        return PrefixStatistics(
            num_lookups=self._num_lookups,
            num_hits=self._num_hits,
            num_tokens=self._num_tokens,
            num_reused=self._num_reused,
            num_published=self._tree.num_published,
            num_evicted={kind: self._tree.num_evicted[kind] for kind in self._tree.queues},
            num_kept=self._tree.num_blocks,
            ends={end.value: number for end, number in self._ends.items()},
        )

    def acquire(
        self,
        tokens: TokenIds,
        namespace: Any = None,
        *,
        media: Iterable[Media] = (),
        max_reused: int | None = None,
    ) -> Sequence:
        """Return a new sequence with the longest beginning of a text that is kept: its `seq_len` says how long that is.

        It takes no free block and moves no row, and what it holds stays until it is freed. The caller steps the other
        tokens, at least the last one; each commit lets whole blocks be found by others.

        Args:
            tokens: the ids of the whole text, at least one.
            namespace: plain data (None, numbers, strings, bytes, and lists, tuples and mappings of these) that tell
                apart what must not be shared: an adapter's name, a user's salt, settings of rotary positions that are
                not the model's own.
            media: which of the tokens stand for images or the like, whose digests must agree too.
            max_reused: tokens to reuse at most, for instance 0 if the logits of all are wanted; default all but the
                last.

        Raises:
            InvalidTypeError, InvalidValueError: ids are missing or negative, or something is no id; the namespace is no
                plain data; media overlap or reach beyond the tokens. Nothing has changed.
        """
        text = self._text(tokens, namespace, media, max_reused)
        root = self._root(text.namespace)
        nodes, found = self._look_up(root, text)
        self._num_lookups += 1
        self._num_tokens += len(text.tokens)
        self._ends[found.end] += 1
        return self._sequence(text, root, nodes, found.num_tokens)

    def lookup(
        self,
        tokens: TokenIds,
        namespace: Any = None,
        *,
        media: Iterable[Media] = (),
        max_reused: int | None = None,
    ) -> Lookup:
        """Return how many tokens `acquire` would reuse now, and why not more; nothing is held or counted.

        Raises:
            InvalidTypeError, InvalidValueError: as `acquire`.
        """
        text = self._text(tokens, namespace, media, max_reused)
        return self._look_up(self._root(text.namespace), text)[1]

    def publish(self, sequence: Sequence) -> int:
        """Let others find all tokens of a sequence, its short last block too; its whole blocks they find without this.

        The sequence may go on: its next token then takes a copy of the short block.

        Returns:
            How many blocks came to be kept, counted once for all kinds of layers: 0 if others had computed the same
            before, or if the sequence's rows may not be shared, since the weights have changed or its namespace was
            invalidated meanwhile.

        Raises:
            InvalidTypeError: `sequence` is no `Sequence`.
            InvalidValueError: it was not acquired here (nor is it the fork of one that was), it is freed, or in an open
                step, whose tokens are not its own yet.
        """
        if not isinstance(sequence, Sequence):
            raise InvalidTypeError(f"sequence is a {type(sequence).__name__}; expected a Sequence")
        if sequence.pool is not self.pool or not isinstance(sequence.lineage, Lineage):
            raise InvalidValueError("sequence was not acquired here; expected one that acquire() returned, or its fork")
        sequence.check_usable()
        self._look_at_weights()
        return self._publish([sequence], short_too=True)

    def evict(self, num_blocks: int, kind: str | None = None) -> int:
        """Let go of blocks that no sequence uses, in the order of the policy; return how many of the kind went.

        Args:
            num_blocks: of the kind, at most.
            kind: of layers; default "full" where there is one. With a full block go its sliding ones.

        Raises:
            InvalidTypeError, InvalidValueError: `num_blocks` is no number >= 0, or there is no such kind.
        """
        num_blocks = check_int("num_blocks", num_blocks, minimum=0)
        kind = next(iter(self._tree.queues)) if kind is None else kind
        self.pool.spec.check_kind(kind)
        queue = self._tree.queues[kind]
        return sum(takewhile(bool, (queue.let_go() for _ in range(num_blocks))))

    def invalidate(self, namespace: Any = None) -> int:
        """Forget all that was computed in a namespace, whatever the weights; return how many blocks were let go.

        Sequences that use them keep them, as long as they live, and share nothing more. An unknown namespace changes
        nothing, and a warning says so.

        Raises:
            InvalidTypeError: the namespace is no plain data.
        """
        wanted = encoded("namespace", namespace)
        found = [(key, root) for key, root in self._roots.items() if key[0] == wanted]
        if not found:
            warnings.warn(
                f"there is nothing to invalidate in the namespace {namespace!r}: no text was acquired in it, or nothing"
                " of that is left",
                stacklevel=2,
            )
        for key, _ in found:
            del self._roots[key]
        return sum(self._tree.forget(root) for _, root in found)

    def keys(self, tokens: TokenIds, namespace: Any = None, *, media: Iterable[Media] = ()) -> list[bytes]:
        """Return the keys of a text's whole blocks, 32 bytes each, the same in every process.

        They stand for the tokens before and in the block, the media among them, the namespace, the content of the
        weights, the layers' sizes, the block size and the storage. The first call hashes all weights, and so does the
        first after any of them has changed.

        Raises:
            InvalidTypeError, InvalidValueError: as `acquire`.
        """
        text = self._text(tokens, namespace, media, None)
        weights = None if self._guard is None else self._guard.fingerprint()
        key, size = root_key(self._origin(text.namespace, weights)), self.pool.block_size
        content = Content(text.tokens, 0, text.media)
        keys = []
        for start in range(0, len(text.tokens) - size + 1, size):
            key = block_key(key, content.part(start, start + size))
            keys.append(key)
        return keys

    def committed(self, sequences: list[Sequence]) -> None:
        """Keep the blocks of sequences that have become whole; called by a step's commit."""
        ready = []
        for sequence in sequences:
            lineage = sequence.lineage
            if not isinstance(lineage, Lineage):
                continue
            lineage.may_share &= self._enabled  # nobody looks at the weights meanwhile
            if lineage.num_unread:
                self._num_hits += 1
                self._num_reused += lineage.num_unread
                lineage.num_unread = 0
            if sequence.seq_len - lineage.node.stop >= self.pool.block_size:
                ready.append(sequence)
        if not ready:
            return
        try:
            self._look_at_weights()
        except Exception:  # the next `acquire` raises it, but a commit cannot fail
            for sequence in ready:
                assert isinstance(sequence.lineage, Lineage)
                sequence.lineage.may_share = False
        self._publish(ready, short_too=False)

    def check(self) -> None:
        """Check the books; called by `BlockPool.check`.

        Raises:
            AssertionError: they are wrong, which is a fault of this package.
        """
        self._tree.check(self._roots.values())

    def _text(self, tokens: Any, namespace: Any, media: Any, max_reused: Any) -> _Text:
        ids = check_token_ids("tokens", tokens)
        limit = len(ids) - 1
        if max_reused is not None:
            limit = min(limit, check_int("max_reused", max_reused, minimum=0))
        return _Text(ids, encoded("namespace", namespace), check_media(media, len(ids)), limit)

    def _look_at_weights(self) -> bytes:
        """Return the state of the weights, and count if it is another one than at the last look."""
        weights = b"" if self._guard is None else self._guard.state()
        if weights != self._weights:
            self._weights = weights
            self._num_changes += 1
        return weights

    def _root(self, namespace: bytes) -> Root:
        weights = self._look_at_weights()
        root = self._roots.get((namespace, weights))
        if root is None:
            root = self._roots[namespace, weights] = Root(namespace, weights)
        return root

    def _origin(self, namespace: bytes, weights: str | None) -> bytes:
        """Return all that keys and values depend on besides tokens and media, as bytes."""
        spec = self.pool.spec
        layers = [[spec.kind, spec.num_heads, *spec.head_dims, spec.window, spec.sinks] for spec in spec.layers]
        return encoded(
            "namespace",
            {
                "namespace": namespace,
                "weights": weights,
                "layers": layers,
                "block size": self.pool.block_size,
                "storage": self.pool.storage,
            },
        )

    def _look_up(self, root: Root, text: _Text) -> tuple[list[Node], Lookup]:
        if not self._enabled:
            return [], Lookup(0, LookupEnd.SWITCHED_OFF)
        size = self.pool.block_size
        nodes, found = kept_path(root, Content(text.tokens, 0, text.media), text.limit, size)
        length = usable_length(nodes, found, self.pool.new_tables(), size)
        if length == text.limit:
            end = LookupEnd.WHOLE
        elif length < found:
            end = LookupEnd.WINDOW
        else:
            end = LookupEnd.NOT_KEPT if root.children else LookupEnd.NOTHING_KEPT
        return nodes, Lookup(length, end)

    def _sequence(self, text: _Text, root: Root, nodes: list[Node], length: int) -> Sequence:
        tables = self.pool.new_tables()
        for kind, table in tables.items():
            sinks, seen = table.places_needed(length)
            table.share([nodes[place].kept[kind].block for place in (*sinks, *seen)], seen.start - len(sinks))
        sequence = self.pool.adopt(tables, text.tokens[:length])
        whole = length // self.pool.block_size
        node = nodes[whole - 1] if whole else root
        sequence.lineage = Lineage(root, node, self._num_changes, text.media, length)
        return sequence

    def _publish(self, sequences: list[Sequence], short_too: bool) -> int:
        if not self._enabled:
            return 0
        before = self._tree.num_published
        for sequence in sequences:
            lineage = sequence.lineage
            assert isinstance(lineage, Lineage)
            # Rows behind a change are not what would be computed anew, nor is anything behind these.
            is_unchanged = lineage.num_changes == self._num_changes
            if lineage.may_share and is_unchanged and self._is_valid(lineage.root):
                self._tree.keep(sequence, lineage, short_too)
        return self._tree.num_published - before

    def _is_valid(self, root: Root) -> bool:
        return self._roots.get((root.namespace, root.weights)) is root

    def __reduce__(self) -> NoReturn:
        raise InvalidTypeError("a PrefixCache, or a pool that has one, cannot be copied or pickled")

    def __repr__(self) -> str:
        kept = ", ".join(f"{number} {kind} blocks kept" for kind, number in self._tree.num_blocks.items())
        return f"PrefixCache({kept}, {self._num_reused} of {self._num_tokens} tokens reused)"
