"""Acts on a pool that is too small for them, each done to plain lists as well, and everything compared after each.

python -m tests.storage.random_pool_acts 1000000 SEED
"""

import argparse
import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from kvcache import BlockPool, CacheSpec, InvalidValueError, LayerSpec, OutOfBlocksError, RollbackError, Sequence
from kvcache.storage import Step
from tests.storage.pools import NUM_IDS, attend_last, known_queries, known_rows, new_ids, row_tables

WINDOW, SINKS = 4, 2
SPEC = CacheSpec([LayerSpec(1, 2, v_head_dim=3), LayerSpec(2, 2, v_head_dim=1, window=WINDOW, sinks=SINKS)])
NUM_BLOCKS = {"full": 10, "sliding": 8}
BLOCK_SIZE = 3
ENDS = ("commit", "abort", "exception", "incomplete")


@dataclass(eq=False)
class Text:
    """What a sequence must be: its tokens, and for each kind its blocks, numbered anew, by their place in the text."""

    sequence: Sequence
    ids: list[int] = field(default_factory=list)
    blocks: dict[str, dict[int, int]] = field(default_factory=lambda: {kind: {} for kind in NUM_BLOCKS})

    def shorten(self, length: int) -> None:
        del self.ids[length:]
        for blocks in self.blocks.values():
            for place in [place for place in blocks if place * BLOCK_SIZE >= length]:
                del blocks[place]

    def leave_behind(self) -> None:
        """Drop the sliding blocks that hold no sink, and no row that the newest token sees."""
        blocks = self.blocks["sliding"]
        for place in list(blocks):
            if place * BLOCK_SIZE >= SINKS and (place + 1) * BLOCK_SIZE <= len(self.ids) - WINDOW:
                del blocks[place]

    def can_be_of(self, length: int) -> bool:
        """Whether all that the next token of a text of this length sees is still there."""
        in_window = range(max(0, length - WINDOW + 1), length)
        seen = {*range(min(SINKS, length)), *in_window}
        return all(position // BLOCK_SIZE in self.blocks["sliding"] for position in seen)


@dataclass(eq=False)
class OpenStep:
    """A step that is not over, and the way back."""

    step: Step
    texts: list[Text]
    new_ids: list[list[int]]
    before: list[dict[str, dict[int, int]]]  # the blocks of each text
    replaced: dict[str, list[int]]  # blocks of which a text has a copy until the end
    num_layers: int = 0  # how many are appended


class CheckedPool:
    """A pool, and what it must be; each method does one act, which the pool may have to refuse."""

    def __init__(self) -> None:
        self.pool = BlockPool(SPEC, NUM_BLOCKS, BLOCK_SIZE, torch.float64)
        self.texts: list[Text] = []
        self.steps: list[OpenStep] = []
        self.num_refused = 0
        self._stored = [(store.k.numpy(), store.v.numpy()) for store in self.pool.stores]  # the same memory
        self._known = [[table.numpy() for table in row_tables(SPEC, layer)] for layer in range(len(SPEC.layers))]
        self._next_id, self._next_block = itertools.count(), itertools.count()

    @property
    def idle(self) -> list[Text]:
        """Texts that are in no open step."""
        busy = {text for step in self.steps for text in step.texts}
        return [text for text in self.texts if text not in busy]

    def new(self) -> None:
        self.texts.append(Text(self.pool.new_sequence()))

    def fork(self, text: Text) -> None:
        blocks = {kind: dict(blocks) for kind, blocks in text.blocks.items()}
        self.texts.append(Text(text.sequence.fork(), text.ids[:], blocks))

    def free(self, text: Text) -> None:
        text.sequence.free()
        self.texts.remove(text)

    def rollback(self, text: Text, n: int) -> None:
        self._shorten(text, len(text.ids) - n, lambda: text.sequence.rollback(n))
        assert text.sequence.can_rollback(n) == (n <= len(text.ids) and text.can_be_of(len(text.ids) - n))

    def truncate(self, text: Text, length: int) -> None:
        self._shorten(text, length, lambda: text.sequence.truncate(length))

    def _shorten(self, text: Text, length: int, act) -> None:
        if not 0 <= length <= len(text.ids):
            with pytest.raises(InvalidValueError):
                act()
        elif not text.can_be_of(length):
            with pytest.raises(RollbackError):
                act()
        else:
            act()
            text.shorten(length)

    def begin(self, texts: AbstractSequence[Text], counts: AbstractSequence[int]) -> OpenStep | None:
        """Start a step that gives each text that many new tokens, None if there are too few blocks."""
        new = [[next(self._next_id) for _ in range(count)] for count in counts]
        needed = {kind: self._needed(kind, texts, counts) for kind in NUM_BLOCKS}
        free = {kind: NUM_BLOCKS[kind] - len(self._holders(kind)) for kind in NUM_BLOCKS}
        sequences = [text.sequence for text in texts]
        for kind in NUM_BLOCKS:
            if needed[kind] > free[kind]:
                with pytest.raises(OutOfBlocksError) as caught:
                    self.pool.step(sequences, new)
                error = caught.value
                assert (error.kind, error.needed, error.available) == (kind, needed[kind], free[kind])
                self.num_refused += 1
                return None
        last_blocks = {(text, kind): text.sequence.table(kind).blocks[-1:] for text in texts for kind in NUM_BLOCKS}
        num_held = {key: len(key[0].blocks[key[1]]) for key in last_blocks}
        before = [{kind: dict(blocks) for kind, blocks in text.blocks.items()} for text in texts]
        opened = OpenStep(self.pool.step(sequences, new), texts, new, before, {kind: [] for kind in NUM_BLOCKS})
        for (text, kind), last in last_blocks.items():
            blocks, table = text.blocks[kind], text.sequence.table(kind)
            if len(text.ids) % BLOCK_SIZE and table.blocks[num_held[text, kind] - 1] != last[0]:  # it is a copy
                place = len(text.ids) // BLOCK_SIZE
                opened.replaced[kind].append(blocks[place])
                blocks[place] = next(self._next_block)
        for text, count in zip(texts, counts, strict=True):
            for place in _new_places(text, count):
                for kind in NUM_BLOCKS:
                    text.blocks[kind][place] = next(self._next_block)
        self.steps.append(opened)
        return opened

    def append(self, opened: OpenStep, look: bool = True) -> None:
        """Append the next layer, and attend in it if asked to `look`."""
        layer, step = opened.num_layers, opened.step
        opened.num_layers += 1
        step.append(layer, *known_rows(SPEC, layer, new_ids(step)))
        if look:
            output = step.attend(layer, known_queries(SPEC, layer, new_ids(step)))
            parts = output[0].split(step.num_tokens, dim=1)
            for text, ids, part in zip(opened.texts, opened.new_ids, parts, strict=True):
                assert (part - _attention(layer, text.ids + ids, len(ids))).abs().max() < 1e-12

    def commit(self, opened: OpenStep, keep: AbstractSequence[int] | None = None) -> None:
        if opened.num_layers < len(SPEC.layers):
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
        try:
            with opened.step:
                while opened.num_layers < (len(SPEC.layers) if end == "commit" else num_layers):
                    self.append(opened, look)
                if end == "abort":
                    opened.step.abort()
                elif end == "exception":
                    raise _Left
        except _Left:
            pass
        except InvalidValueError:
            if end != "incomplete" or opened.num_layers == len(SPEC.layers):
                raise
            end = "exception"
        (self._aborted if end in ("abort", "exception") else self._committed)(opened)

    def _committed(self, opened: OpenStep, keep: AbstractSequence[int] | None = None) -> None:
        self.steps.remove(opened)
        for place, (text, ids) in enumerate(zip(opened.texts, opened.new_ids, strict=True)):
            text.ids += ids if keep is None else ids[: keep[place]]
            text.shorten(len(text.ids))
            text.leave_behind()

    def _aborted(self, opened: OpenStep) -> None:
        self.steps.remove(opened)
        for text, blocks in zip(opened.texts, opened.before, strict=True):
            text.blocks = blocks

    def _holders(self, kind: str) -> Counter[int]:
        """Return by how many texts, and steps that copied it, each block that is not free is held."""
        held = [text.blocks[kind].values() for text in self.texts]
        return Counter(itertools.chain(*held, *(step.replaced[kind] for step in self.steps)))

    def _needed(self, kind: str, texts: AbstractSequence[Text], counts: AbstractSequence[int]) -> int:
        """Return how many blocks a step takes: of those who write in one block, one may have it if nobody else does."""
        new = sum(len(_new_places(text, count)) for text, count in zip(texts, counts, strict=True))
        open_blocks = [
            text.blocks[kind][len(text.ids) // BLOCK_SIZE] for text in texts if len(text.ids) % BLOCK_SIZE != 0
        ]
        holders = self._holders(kind)
        return new + sum(min(writers, holders[block] - 1) for block, writers in Counter(open_blocks).items())

    def check(self) -> None:
        """Check all of the pool against the lists."""
        self.pool.check()
        assert self.pool.sequences == [text.sequence for text in self.texts]
        for text in self.texts:
            assert text.sequence.tokens == text.ids
        for layer, kind in enumerate(NUM_BLOCKS):
            self._check_rows(layer, self._check_blocks(kind))

    def _check_blocks(self, kind: str) -> dict[int, list[int]]:
        """Check who holds which block, and return the tokens whose rows each of them must have."""
        number_of: dict[int, int] = {}  # the pool's block to ours
        ids_of: dict[int, list[int]] = {}
        for text in self.texts:
            places, table = text.blocks[kind], text.sequence.table(kind)
            for place, block in zip(sorted(places), table.blocks, strict=True):
                assert number_of.setdefault(block, places[place]) == places[place]
                ids = text.ids[place * BLOCK_SIZE : (place + 1) * BLOCK_SIZE]
                shorter, longer = sorted([ids, ids_of.get(block, [])], key=len)
                assert longer[: len(shorter)] == shorter
                ids_of[block] = longer
        holders = self._holders(kind)
        assert len(set(number_of.values())) == len(number_of)
        assert self.pool.num_free[kind] == NUM_BLOCKS[kind] - len(holders)
        assert all(self.pool.num_holders(block, kind) == holders[number] for block, number in number_of.items())
        return ids_of

    def _check_rows(self, layer: int, ids_of: dict[int, list[int]]) -> None:
        blocks = np.array([block for block, ids in ids_of.items() for _ in ids], dtype=int)
        rows = np.array([row for ids in ids_of.values() for row in range(len(ids))], dtype=int)
        ids = np.array([token for ids in ids_of.values() for token in ids], dtype=int) % NUM_IDS
        for stored, known in zip(self._stored[layer], self._known[layer], strict=True):
            assert (stored[blocks, :, rows] == known[ids]).all()

    def close(self) -> None:
        """End all steps and free all texts; then every block must be free."""
        for opened in self.steps[:]:
            self.abort(opened)
        for text in self.texts[:]:
            self.free(text)
        self.check()
        assert self.pool.num_free == self.pool.num_blocks == NUM_BLOCKS


class _Left(BaseException):
    """What a step is left by; not an `Exception`, as Ctrl-C is none."""


def _new_places(text: Text, count: int) -> range:
    length = len(text.ids)
    return range(-(-length // BLOCK_SIZE), -(-(length + count) // BLOCK_SIZE))


def _attention(layer: int, ids: list[int], count: int) -> torch.Tensor:
    k, v = known_rows(SPEC, layer, ids)
    q = known_queries(SPEC, layer, ids[len(ids) - count :])
    return attend_last(q[0], k[0], v[0], SPEC.layers[layer].window, SPEC.layers[layer].sinks)


def random_act(pool: CheckedPool, rng: random.Random, look: bool) -> str:
    """Do one act, and return what it was."""
    idle = pool.idle
    act = rng.choices(
        ("new", "fork", "free", "rollback", "truncate", "open", "go on", "step"), (6, 8, 8, 8, 4, 6, 12, 48)
    )[0]
    if act == "go on" and pool.steps:
        opened = rng.choice(pool.steps)
        if opened.num_layers < len(SPEC.layers) and rng.random() < 0.6:
            pool.append(opened, look)
        elif rng.random() < 0.3:
            pool.abort(opened)
        else:
            keep = [rng.randint(0, len(ids)) for ids in opened.new_ids]
            pool.commit(opened, rng.choice([None, keep]))
    elif act == "new" or not idle:
        if len(pool.texts) < 6:
            pool.new()
    elif act == "fork":
        if len(pool.texts) < 6:
            pool.fork(rng.choice(idle))
            if rng.random() < 0.5:
                pool.rollback(pool.texts[-1], rng.randint(1, 2))
    elif act == "free":
        pool.free(rng.choice(idle))
    elif act == "rollback":
        text = rng.choice(idle)
        pool.rollback(text, rng.choice([0, 1, 2, 3, rng.randint(0, len(text.ids) + 1)]))
    elif act == "truncate":
        text = rng.choice(idle)
        pool.truncate(text, rng.randint(0, len(text.ids) + 1))
    else:
        if rng.random() < 0.5:  # those who share their last block
            last = rng.choice(idle).sequence.blocks()[-1:]
            members = [text for text in idle if text.sequence.blocks()[-1:] == last]
            rng.shuffle(members)
        else:
            members = rng.sample(idle, rng.randint(1, min(3, len(idle))))
        opened = pool.begin(members, [rng.choice([1, 1, 1, 1, 2, 2, 3, 7]) for _ in members])
        if opened is None:
            if rng.random() < 0.5:
                pool.free(rng.choice(idle))
        elif act != "open":
            if rng.random() < 0.3:
                for _ in SPEC.layers:
                    pool.append(opened, look)
                pool.commit(opened, [rng.randint(0, len(ids)) for ids in opened.new_ids])
            else:
                pool.run(opened, rng.choices(ENDS, (5, 2, 2, 1))[0], rng.randint(0, 2), look)
    return act


def main(num_acts: int, seed: int, look_every: int) -> None:
    """Do random acts, check everything after each, and report the progress on stderr."""
    rng, pool, begin = random.Random(seed), CheckedPool(), time.perf_counter()
    done: Counter[str] = Counter()
    for number in range(1, num_acts + 1):
        done[random_act(pool, rng, look=number % look_every == 0)] += 1
        pool.check()
        if number % 10_000 == 0 or number == num_acts:
            pool.close()
            speed = number / (time.perf_counter() - begin)
            print(f"{number:,} acts, {speed:,.0f} a second, {pool.num_refused:,} steps refused", file=sys.stderr)
    print(f"seed {seed}: {num_acts:,} acts right, {pool.num_refused:,} steps refused; {dict(done)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("num_acts", type=int)
    parser.add_argument("seed", type=int)
    parser.add_argument("--look-every", type=int, default=4, help="check attention in every n-th act")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    main(arguments.num_acts, arguments.seed, arguments.look_every)
