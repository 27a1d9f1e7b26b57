"""A pool with a prefix cache, too small for what is done to it, and plain lists that say what both must be."""

import warnings
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from kvcache import BlockPool, CacheSpec, InvalidValueError, LayerSpec, OutOfBlocksError, RollbackError
from kvcache.prefix import Media, PrefixCache, first_in_first_out, least_recently_used
from kvcache.storage import Step
from tests.prefix.checked_texts import BLOCK_SIZE, NOWHERE, WINDOW, Origin, Text, content
from tests.prefix.runs import nodes
from tests.prefix.state_rows import StateRows, as_heads

FULL = LayerSpec(1, 2, v_head_dim=3)
SPECS = {
    "mixed": CacheSpec([FULL, LayerSpec(2, 2, v_head_dim=1, window=WINDOW, sinks=2)]),
    "full": CacheSpec([FULL]),
    "sliding": CacheSpec([LayerSpec(2, 2, v_head_dim=1, window=WINDOW)]),
}
NUM_BLOCKS = {"full": 18, "sliding": 13}
POLICIES = {"lru": least_recently_used, "fifo": first_in_first_out}
NAMESPACES: list[Any] = [None, "adapter", {"adapter": "adapter"}]
UNKNOWN = ["adapter"]
DIGESTS = [b"image", b"imagine"]
ENDS = ("commit", "abort", "exception", "incomplete")


@dataclass(eq=False)
class OpenStep:
    """A step that is not over, and the way back."""

    step: Step
    texts: list[Text]
    new_ids: list[list[int]]
    blocks: list[dict[str, list[int]]]  # of each text before the step
    new_states: list[list[list[int]]] = field(default_factory=list)  # in each layer that is appended, of each text

    @property
    def num_layers(self) -> int:
        return len(self.new_states)


class CheckedPrefixes:
    """A pool with a prefix cache, and what they must be; each method does one act, which may have to be refused.

    Args:
        layers: which of `SPECS`.
        policy: which of `POLICIES`.
    """

    def __init__(self, layers: str = "mixed", policy: str = "lru") -> None:
        self.spec = SPECS[layers]
        self.num_blocks = {kind: NUM_BLOCKS[kind] for kind in self.spec.kinds}
        self.pool = BlockPool(self.spec, self.num_blocks, BLOCK_SIZE, torch.float64)
        self.model = torch.nn.Linear(2, 2, bias=False)
        self.prefixes = PrefixCache(self.pool, self.model, policy=POLICIES[policy])
        self.texts: list[Text] = []
        self.steps: list[OpenStep] = []
        self.counts: Counter[str] = Counter()
        self._version = 0
        self._generations = [0] * len(NAMESPACES)
        self._num_lookups = self._num_hits = self._num_tokens = self._num_reused = 0
        # Beginnings that are kept for sure, each with the length from which on what windows need is kept too.
        self._sure: dict[Origin, dict[Any, int]] = {}
        self._num_evicted = 0
        self._rows = [StateRows(layer, number) for number, layer in enumerate(self.spec.layers)]
        self._stored = [[rows.numpy().swapaxes(1, 2) for rows in (store.k, store.v)] for store in self.pool.stores]

    @property
    def has_window(self) -> bool:
        return "sliding" in self.num_blocks

    @property
    def idle(self) -> list[Text]:
        """Texts that are in no open step."""
        return [text for text in self.texts if text.sequence.open_step is None]

    def new(self) -> None:
        self.texts.append(Text(self.pool.new_sequence(), states=[[] for _ in self.spec.layers]))

    def acquire(
        self, ids: list[int], namespace: int, media: AbstractSequence[Media] = (), max_reused: int | None = None
    ) -> Text:
        origin = Origin(namespace, self._generations[namespace], self._version)
        of_position = {
            position: (1 + DIGESTS.index(medium.digest), position - medium.start)
            for medium in media
            for position in range(medium.start, medium.stop)
        }
        limit = len(ids) - 1 if max_reused is None else min(max_reused, len(ids) - 1)
        sure = self._sure_length(origin, content(ids, of_position), limit)
        arguments: dict[str, Any] = {"media": media, "max_reused": max_reused}
        if self._num_lookups % 4 == 0:
            num_tokens = self.prefixes.lookup(ids, NAMESPACES[namespace], **arguments).num_tokens
        else:
            num_tokens = None
        sequence = self.prefixes.acquire(ids, NAMESPACES[namespace], **arguments)
        found = sequence.seq_len
        assert num_tokens in (None, found)
        assert sequence.tokens == ids[:found]
        assert sure <= found <= (limit if self.prefixes.enabled else 0)
        text = Text(sequence, origin, ids, of_position, num_unread=found, sure_from=found if self.has_window else 0)
        text.states = [[] for _ in self.spec.layers]
        for layer in range(len(self.spec.layers)):
            text.states[layer] = text.run(layer, ids[:found], self._version)
        text.ids = ids[:found]
        self.texts.append(text)
        self._num_lookups += 1
        self._num_tokens += len(ids)
        self.counts["texts of which tokens were found"] += found > 0
        self.counts["texts of which tokens had to be found"] += sure > 0
        return text

    def publish(self, text: Text) -> None:
        if text.sequence.open_step is not None or text.origin is NOWHERE:
            with pytest.raises(InvalidValueError):
                self.prefixes.publish(text.sequence)
            return
        num_nodes = self.prefixes.publish(text.sequence)
        if self._may_be_kept(text):
            self._keep(text, len(text.ids))
        else:
            assert num_nodes == 0

    def fork(self, text: Text) -> Text:
        states = [states[:] for states in text.states]
        other = Text(text.sequence.fork(), text.origin, text.asked, text.media, text.ids[:], states)
        other.sure_from, other.has_gap, other.shares = text.sure_from, text.has_gap, text.shares
        other.part_at(len(other.ids))
        self.texts.append(other)
        return other

    def free(self, text: Text) -> None:
        text.sequence.free()
        self.texts.remove(text)

    def rollback(self, text: Text, n: int) -> None:
        self._shorten(text, len(text.ids) - n, lambda: text.sequence.rollback(n))

    def truncate(self, text: Text, length: int) -> None:
        self._shorten(text, length, lambda: text.sequence.truncate(length))

    def _shorten(self, text: Text, length: int, act: Callable[[], None]) -> None:
        if not 0 <= length <= len(text.ids):
            with pytest.raises(InvalidValueError):
                act()
        elif not all(text.holds(kind, length) for kind in self.num_blocks):
            with pytest.raises(RollbackError):
                act()
        else:
            act()
            text.shorten(length)

    def evict(self, num_blocks: int, kind: str) -> None:
        kept = self.prefixes._tree.queues[kind].blocks
        idle = set(kept) - self._held(kind)
        assert self.prefixes.evict(num_blocks, kind) == min(num_blocks, len(idle))
        self._note_evictions()

    def invalidate(self, namespace: int | None) -> None:
        """Invalidate a namespace, or for None one that nobody uses."""
        before = self._num_kept()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            num_blocks = self.prefixes.invalidate(UNKNOWN if namespace is None else NAMESPACES[namespace])
        assert num_blocks == before - self._num_kept()
        current = [text for text in self.texts if self._is_current(text.origin) and text.origin.namespace == namespace]
        assert not (caught and (num_blocks or current))
        assert caught or namespace is not None
        self.counts["namespaces invalidated"] += not caught
        self.counts["blocks invalidated"] += num_blocks
        if namespace is not None:
            self._generations[namespace] += 1

    def switch(self) -> None:
        self.prefixes.enabled = not self.prefixes.enabled

    def change_weights(self, through_data: bool) -> None:
        """Change the weights in place, so that they are none that there have been."""
        self._version += 1
        if through_data:  # which moves no version
            self.model.weight.data[0, 1] += 1
        else:
            with torch.no_grad():
                self.model.weight += 1

    def begin(self, texts: AbstractSequence[Text], new_ids: list[list[int]]) -> OpenStep | None:
        """Start a step that gives each text new tokens, None if there are too few blocks."""
        sequences = [text.sequence for text in texts]
        for kind, num_blocks in self.num_blocks.items():
            needed, available = self._needed(kind, texts, new_ids), num_blocks - len(self._held(kind))
            if needed > available:
                before = self._everything()
                with pytest.raises(OutOfBlocksError) as caught:
                    self.pool.step(sequences, new_ids)
                error = caught.value
                assert (error.kind, error.needed, error.available) == (kind, needed, available)
                assert self._everything() == before
                self.counts["steps refused"] += 1
                return None
        blocks = [{kind: sequence.blocks(kind) for kind in self.num_blocks} for sequence in sequences]
        opened = OpenStep(self.pool.step(sequences, new_ids), list(texts), new_ids, blocks)
        self.counts["steps"] += 1
        self.steps.append(opened)
        self._note_evictions()
        return opened

    def append(self, opened: OpenStep, look: bool = True) -> None:
        """Append the next layer, run with the weights as they are, and attend in it if asked to `look`."""
        layer = opened.num_layers
        rows, step = self._rows[layer], opened.step
        new = [text.run(layer, ids, self._version) for text, ids in zip(opened.texts, opened.new_ids, strict=True)]
        opened.new_states.append(new)
        states = np.array([state for states in new for state in states])
        step.append(layer, as_heads(rows.keys(states)), as_heads(rows.values(states)))
        if look:
            output = step.attend(layer, as_heads(rows.queries(states)))[0].transpose(0, 1).numpy()
            start = 0
            for text, states in zip(opened.texts, new, strict=True):
                part = output[start : start + len(states)]
                start += len(states)
                expected = rows.attention(np.array(text.states[layer] + states), len(states))
                assert np.abs(part - expected).max() < 1e-12

    def commit(self, opened: OpenStep, keep: list[int] | None = None) -> None:
        if opened.num_layers < len(self.spec.layers):
            with pytest.raises(InvalidValueError, match="are not appended; expected every layer before the commit"):
                opened.step.commit(keep)
            assert opened.step.is_open
            return
        opened.step.commit(keep)
        self._committed(opened, keep)

    def abort(self, opened: OpenStep) -> None:
        opened.step.abort()
        self._aborted(opened)

    def run(self, opened: OpenStep, end: str, num_layers: int = 2, look: bool = True) -> None:
        """Run a step in a `with` statement that ends in one of `ENDS`; if not by a commit, after `num_layers`."""
        all_layers = len(self.spec.layers)
        try:
            with opened.step:
                while opened.num_layers < (all_layers if end == "commit" else min(num_layers, all_layers)):
                    self.append(opened, look)
                if end == "abort":
                    opened.step.abort()
                elif end == "exception":
                    raise _Left
        except _Left:
            pass
        except InvalidValueError:
            if end != "incomplete" or opened.num_layers == all_layers:
                raise
            end = "exception"
        (self._aborted if end in ("abort", "exception") else self._committed)(opened)

    def _committed(self, opened: OpenStep, keep: list[int] | None = None) -> None:
        self.steps.remove(opened)
        self.counts["steps committed"] += 1
        for place, (text, ids) in enumerate(zip(opened.texts, opened.new_ids, strict=True)):
            count = len(ids) if keep is None else keep[place]
            text.ids += ids[:count]
            for layer, states in enumerate(text.states):
                states += opened.new_states[layer][place][:count]
            self._num_hits += text.num_unread > 0
            self._num_reused += text.num_unread
            text.num_unread = 0
            if count < len(ids):
                text.part_at(len(text.ids))
            text.shares &= self.prefixes.enabled
            if self._may_be_kept(text):
                self._keep(text, _whole(len(text.ids)))
            elif self.has_window:
                text.sure_from, text.has_gap = len(text.ids), True

    def _aborted(self, opened: OpenStep) -> None:
        self.steps.remove(opened)
        for text, blocks in zip(opened.texts, opened.blocks, strict=True):
            assert {kind: text.sequence.blocks(kind) for kind in self.num_blocks} == blocks

    def _is_current(self, origin: Origin) -> bool:
        return origin is not NOWHERE and origin[1:] == (self._generations[origin.namespace], self._version)

    def _may_be_kept(self, text: Text) -> bool:
        return self.prefixes.enabled and text.shares and self._is_current(text.origin)

    def _keep(self, text: Text, length: int) -> None:
        """Take note that the first tokens of a text are kept."""
        if text.has_gap:  # it may have replaced a block that held less tokens, but had them in all layers
            self._sure.clear()
            text.has_gap = False
        if length >= text.sure_from:
            self._sure.setdefault(text.origin, {}).setdefault(text.content[:length], text.sure_from)

    def _sure_length(self, origin: Origin, wanted: tuple[Any, ...], limit: int) -> int:
        """Return how many of the first tokens of a text must be found."""
        if not self.prefixes.enabled:
            return 0
        all_whole = all(node.kept.keys() == self.num_blocks.keys() for node in nodes(self.prefixes))
        longest = 0
        for kept, start in self._sure.get(origin, {}).items():
            common = _common(kept, wanted)
            if not all_whole:  # of a block's first tokens the kept one may be another that its window has left
                common = _whole(common)
            if (length := min(common, limit)) >= start:
                longest = max(longest, length)
        return longest

    def _note_evictions(self) -> None:
        """If there were any, take note that nothing is sure to be kept but what texts hold."""
        num_evicted = sum(self.prefixes.statistics.num_evicted.values())
        if num_evicted == self._num_evicted:
            return
        self._num_evicted = num_evicted
        self._sure.clear()
        for text in self.texts:
            if self.has_window:
                text.sure_from = len(text.ids)
                text.has_gap |= "full" not in self.num_blocks

    def _held(self, kind: str) -> set[int]:
        """Return the blocks that texts or steps hold."""
        held = {block for text in self.texts for block in text.sequence.table(kind).blocks}
        for opened in self.steps:
            for _, blocks in opened.step.reservations[kind].claims:
                held.update(blocks)
        return held

    def _needed(self, kind: str, texts: AbstractSequence[Text], new_ids: list[list[int]]) -> int:
        """Return how many blocks a step takes: of those who write in one block, one may have it if nobody else does."""
        new, open_blocks = 0, Counter[int]()
        for text, ids in zip(texts, new_ids, strict=True):
            length = len(text.ids)
            new += -(-(length + len(ids)) // BLOCK_SIZE) - -(-length // BLOCK_SIZE)
            if length % BLOCK_SIZE:
                open_blocks[text.sequence.table(kind).blocks[-1]] += 1
        return new + sum(min(writers, self.pool.num_holders(block, kind) - 1) for block, writers in open_blocks.items())

    def _num_kept(self) -> int:
        return sum(self.prefixes.statistics.num_kept.values())

    def _everything(self) -> Any:
        """Return all that pool and prefix cache know and hold, for comparison with `==`."""
        ledgers = [self.pool.ledger(kind) for kind in self.num_blocks]
        sequences = [text.sequence for text in self.texts]
        tree = [
            (node.content, [child.content for child in node.children], dict(node.kept)) for node in nodes(self.prefixes)
        ]
        return (
            [(ledger._free[:], ledger.holders) for ledger in ledgers],
            [(sequence.tokens, [sequence.table(kind).blocks[:] for kind in self.num_blocks]) for sequence in sequences],
            tree,
            self.prefixes.statistics,
            [rows.tobytes() for stored in self._stored for rows in stored],
        )

    def check(self) -> None:
        """Check all of pool and prefix cache against the lists."""
        self.pool.check()
        assert self.pool.sequences == [text.sequence for text in self.texts]
        assert [text.sequence.tokens for text in self.texts] == [text.ids for text in self.texts]
        available = {kind: num_blocks - len(self._held(kind)) for kind, num_blocks in self.num_blocks.items()}
        assert self.pool.num_available == available
        self._check_statistics()
        for layer in range(len(self.spec.layers)):
            self._check_rows(layer)

    def _check_statistics(self) -> None:
        statistics = self.prefixes.statistics
        assert statistics.num_lookups == self._num_lookups == sum(statistics.ends.values())
        assert statistics.num_hits == self._num_hits
        assert statistics.num_tokens == self._num_tokens
        assert statistics.num_reused == self._num_reused

    def _check_rows(self, layer: int) -> None:
        """Check all rows that texts hold, those of open steps too, and that all that the next tokens see are there."""
        kind = self.spec.layers[layer].kind
        new = {
            text: states
            for opened in self.steps
            if opened.num_layers > layer
            for text, states in zip(opened.texts, opened.new_states[layer], strict=True)
        }
        rows: list[int] = []
        states: list[int] = []
        for text in self.texts:
            assert text.holds(kind, len(text.ids))
            there = text.states[layer] + new.get(text, [])
            blocks = text.sequence.table(kind).blocks
            slots = [block * BLOCK_SIZE + row for block in blocks for row in range(BLOCK_SIZE)]
            held = text.held(kind, len(there))
            assert len(slots) >= len(held)
            rows += slots[: len(held)]
            states += [there[position] for position in held]
        numbers, places = np.divmod(np.array(rows, dtype=int), BLOCK_SIZE)
        k, v = self._stored[layer]
        expected = np.array(states, dtype=int)
        assert (k[numbers, places] == self._rows[layer].keys(expected)).all()
        assert (v[numbers, places] == self._rows[layer].values(expected)).all()

    def close(self) -> None:
        """End all steps and free all texts; then every block can be had."""
        for opened in self.steps[:]:
            self.abort(opened)
        for text in self.texts[:]:
            self.free(text)
        self.check()
        assert self.pool.num_available == self.num_blocks
        for kind in self.num_blocks:
            self.evict(NUM_BLOCKS[kind], kind)
        self.check()
        assert self.pool.num_free == self.num_blocks
        assert not nodes(self.prefixes)


class _Left(BaseException):
    """What a step is left by; not an `Exception`, as Ctrl-C is none."""


def _common(one: AbstractSequence[Any], other: AbstractSequence[Any]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (mine, yours) in pairs if mine != yours), min(len(one), len(other)))


def _whole(length: int) -> int:
    return length // BLOCK_SIZE * BLOCK_SIZE
