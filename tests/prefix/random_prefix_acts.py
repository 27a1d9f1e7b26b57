"""Random acts on a pool with a prefix cache, everything checked after each.

python -m tests.prefix.random_prefix_acts 1000000 SEED
"""

import argparse
import random
import sys
import time
from collections import Counter

import torch

from kvcache.prefix import Media
from tests.prefix.checked_prefixes import DIGESTS, ENDS, NAMESPACES, POLICIES, SPECS, CheckedPrefixes
from tests.prefix.checked_texts import Text

MAX_TEXTS = 6
TOKENS = (0, 1, 255, 2**62)
TRUNKS = ([0, 1, 0, 255, 1, 1, 0, 0, 2**62, 1, 1, 0], [0, 1, 0, 255, 1, 255, 0, 1, 1, 0, 0, 0], [1] * 12)


def random_text(rng: random.Random) -> tuple[list[int], list[Media]]:
    """Return the ids of a text, which many others begin like, and what some of them stand for."""
    ids = rng.choice(TRUNKS)[: rng.choice([0, 2, 3, 4, 6, 7, 9])]
    ids = ids + [rng.choice(TOKENS) for _ in range(rng.choice([0, 0, 1, 1, 2, 5]))] or [1]
    media, start = [], 0
    while rng.random() < 0.2:
        start += rng.choice([0, 1, 2, 3])
        stop = start + rng.choice([1, 2, 4])
        if stop > len(ids):
            break
        media.append(Media(start, stop, rng.choice(DIGESTS)))
        start = stop
    return ids, media


def random_tokens(rng: random.Random, text: Text, count: int) -> list[int]:
    """Return the next tokens: as long as it goes those that were asked for."""
    rest = text.asked[len(text.ids) :] if text.asked[: len(text.ids)] == text.ids else []
    rest = rest[: count if rng.random() < 0.5 else None]
    return rest or [rng.choice(TOKENS) for _ in range(count)]


ACTS = {
    "acquire": 24,
    "publish": 8,
    "fork": 6,
    "free": 16,
    "rollback": 5,
    "truncate": 2,
    "open": 6,
    "go on": 12,
    "step": 36,
    "evict": 2,
    "invalidate": 0.5,
    "change weights": 0.5,
    "switch": 0.8,
    "new": 0.5,
}


def random_act(checked: CheckedPrefixes, rng: random.Random, look: bool = True) -> str:
    """Do one act, and return what it was."""
    idle = checked.idle
    act = rng.choices(list(ACTS), list(ACTS.values()))[0]
    if not checked.prefixes.enabled and rng.random() < 0.1:
        act = "switch"
    has_room = len(checked.texts) < MAX_TEXTS
    if act == "evict":
        checked.evict(rng.choice([0, 1, 2, 20]), rng.choice(list(checked.num_blocks)))
    elif act == "invalidate":
        checked.invalidate(rng.choice([None, *range(len(NAMESPACES))]))
    elif act == "change weights":
        checked.change_weights(rng.random() < 0.5)
    elif act == "switch":
        checked.switch()
    elif act == "go on" and checked.steps:
        opened = rng.choice(checked.steps)
        if opened.num_layers < len(checked.spec.layers) and rng.random() < 0.6:
            checked.append(opened, look)
        elif rng.random() < 0.3:
            checked.abort(opened)
        else:
            keep = [rng.randint(0, len(ids)) for ids in opened.new_ids]
            checked.commit(opened, rng.choice([None, keep]))
    elif act == "new" and has_room:
        checked.new()
    elif act == "acquire" or not idle:
        if has_room:
            ids, media = random_text(rng)
            max_reused = rng.randint(0, len(ids)) if rng.random() < 0.1 else None
            checked.acquire(ids, rng.choice([0, 0, 0, 0, 0, 1, 2]), media, max_reused)
    elif act == "publish":
        checked.publish(rng.choice(checked.texts))
    elif act == "fork":
        if has_room:
            text = checked.fork(rng.choice(idle))
            if rng.random() < 0.5:
                checked.rollback(text, rng.randint(1, 2))
    elif act == "free":
        text = rng.choice(idle)
        if rng.random() < 0.5:
            checked.publish(text)
        checked.free(text)
    elif act == "rollback":
        text = rng.choice(idle)
        checked.rollback(text, rng.choice([0, 1, 2, 3, rng.randint(0, len(text.ids) + 1)]))
    elif act == "truncate":
        text = rng.choice(idle)
        checked.truncate(text, rng.randint(0, len(text.ids) + 1))
    else:
        members = rng.sample(idle, rng.randint(1, min(3, len(idle))))
        opened = checked.begin(members, [random_tokens(rng, text, rng.choice([1, 1, 1, 2, 3, 7])) for text in members])
        if opened is None:
            for text in rng.sample(idle, rng.randint(0, 2) if len(idle) > 1 else 0):
                checked.free(text)
        elif act != "open":
            if rng.random() < 0.2:
                for _ in checked.spec.layers:
                    checked.append(opened, look)
                checked.commit(opened, [rng.randint(0, len(ids)) for ids in opened.new_ids])
            else:
                checked.run(opened, rng.choices(ENDS, (8, 1, 1, 1))[0], rng.randint(0, 2), look)
    return act


def main(num_acts: int, seed: int, layers: str, policy: str, look_every: int) -> None:
    """Do random acts, check everything after each, and report the progress on stderr."""
    rng, begin = random.Random(seed), time.perf_counter()
    checked = CheckedPrefixes(layers, policy)
    done: Counter[str] = Counter()
    for number in range(1, num_acts + 1):
        done[random_act(checked, rng, look=number % look_every == 0)] += 1
        checked.check()
        if number % 10_000 == 0 or number == num_acts:
            checked.close()
            speed = number / (time.perf_counter() - begin)
            counts = ", ".join(f"{count:,} {name}" for name, count in checked.counts.items())
            print(f"{number:,} acts, {speed:,.0f} a second; {counts}", file=sys.stderr)
    print(f"seed {seed}, {layers} layers, {policy}: {num_acts:,} acts right; {dict(done)}")
    print(f"{dict(checked.counts)}; {checked.prefixes.statistics}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("num_acts", type=int)
    parser.add_argument("seed", type=int)
    parser.add_argument("--layers", choices=SPECS, default="mixed")
    parser.add_argument("--policy", choices=POLICIES, default="lru")
    parser.add_argument("--look-every", type=int, default=1, help="check attention in every n-th act only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    main(**vars(arguments))
