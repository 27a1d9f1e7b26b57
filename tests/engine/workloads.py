"""Random requests over a pool that is too small for all of them; all that is picked at random follows from a seed.

Many begin alike, some end early, some have several texts, some propose tokens, and some are too large. After each step
the pool's books are checked, and at the end every text is held against a run of its own without a cache.
"""

import random
from collections import Counter
from functools import partial
from unittest.mock import patch

import torch

from kvcache import BlockPool, CacheSpec, InvalidValueError, PrefixCache
from kvcache.engine.scheduler import Scheduler
from kvcache.hf import forward_step, use_attention
from tests.engine.proposals import Foretold
from tests.engine.texts import Noted, cold, cold_logits, ids_of

STEPS = 2000  # more than any takes


def scheduler_of(model, num_blocks=64, block_size=4, max_step_tokens=512, max_running=64, forward=None):
    pool = BlockPool(CacheSpec.from_config(model.config), num_blocks, block_size, model.dtype)
    forward = partial(forward_step, model) if forward is None else forward
    return Scheduler(PrefixCache(pool, model), forward, max_step_tokens, max_running)


def run(scheduler, *requests):
    """Add requests, and step until nothing is left."""
    for request in requests:
        scheduler.add(request)
    with torch.no_grad(), use_attention(scheduler.prefixes.model):
        for _ in range(STEPS):
            if scheduler.is_idle:
                break
            scheduler.step()
            scheduler.pool.check()
    check_left(scheduler)


def check_left(scheduler):
    """Nothing runs, waits or holds a block but the prefix cache."""
    assert scheduler.is_idle
    assert scheduler.requests == []
    assert scheduler.pool.sequences == []
    assert scheduler.pool.num_available == scheduler.pool.num_blocks
    scheduler.pool.check()


def run_workload(model, tokenizer, seed, known, forward=None):
    """Run one, check it, and return how often what happened.

    `known` has texts of the model by their prompts, and gets those that are computed here: what is proposed is known.
    `forward` runs the model's steps; default: `forward_step`.
    """
    workload = _Workload(model, tokenizer, seed, known, forward)
    lookup = partial(Foretold, texts=list(known.values()), seed=seed)
    with torch.no_grad(), use_attention(model), patch("kvcache.engine.request.PromptLookup", lookup):
        workload.run()
    workload.check_texts()
    return workload.happened


class _Workload:
    def __init__(self, model, tokenizer, seed, known, forward):
        self.happened = Counter()
        self._known, self._proposes = known, random.Random(seed)  # whoever proposes, all else is the same
        self._model, self._tokenizer, self._random = model, tokenizer, random.Random(seed)
        self._beginnings = [ids_of(length, seed=100 + index) for index, length in enumerate((3, 9, 16))]
        block_size = self._random.choice([1, 2, 3, 4, 8])
        num_tokens = {"full": self._random.randint(20, 40), "sliding": self._random.randint(10, 20)}
        kinds = CacheSpec.from_config(model.config).kinds
        self._scheduler = scheduler_of(
            model,
            num_blocks={kind: -(-num_tokens[kind] // block_size) + 1 for kind in kinds},
            block_size=block_size,
            max_step_tokens=self._random.choice([1, 2, 3, 7, 64]),
            max_running=self._random.choice([1, 2, 3, 64]),
            forward=forward,
        )
        self._requests = [self._request() for _ in range(self._random.randint(3, 5))]
        self._cancelled = set()

    def run(self):
        waiting, under_way = self._requests[:], []
        for _ in range(STEPS):
            if waiting and self._random.random() < 0.5:
                self._add(request := waiting.pop(0))
                under_way.append(request)
            if under_way and self._random.random() < 0.04:
                self._cancel(self._random.choice(under_way))
            self._scheduler.step()
            self._scheduler.pool.check()
            if self._scheduler.is_idle and not waiting:
                break
        check_left(self._scheduler)
        statistics = self._scheduler.prefixes.statistics
        self.happened.update(
            preempted=self._scheduler.num_preemptions,
            hits=statistics.num_hits,
            evicted=sum(statistics.num_evicted.values()),
        )

    def check_texts(self):
        for request in self._requests:
            if isinstance(request.outcome, InvalidValueError):  # too large
                continue
            asked, texts = request.options, request.texts
            assert len(texts) == asked.num_return_sequences
            for new in texts:
                assert len(new) == asked.max_new_tokens or request in self._cancelled
                if new:
                    assert new == cold_logits(self._model, request.ids, new).argmax(dim=-1).tolist()
            for completion in request.outcome:
                if (speculation := completion.speculation) is not None:
                    self.happened["accepted"] += speculation.num_accepted
                    self.happened["rejected"] += speculation.num_proposed - speculation.num_accepted
            reused = [completion.usage.cached_tokens for completion in request.outcome]
            assert max(reused) < len(request.ids)

    def _request(self):
        beginning = self._random.choice(self._beginnings)
        ids = beginning + ids_of(self._random.randint(0, 6), seed=self._random.randint(0, 2))
        given = {"max_new_tokens": self._random.randint(1, 9)}
        if self._random.random() < 0.25:  # several texts, which are the same as all are the likeliest
            given |= {"num_return_sequences": self._random.randint(2, 4), "do_sample": True, "top_k": 1}
        if self._proposes.random() < 0.5:
            given["prompt_lookup_num_tokens"] = self._proposes.randint(1, 6)
            if tuple(ids) not in self._known:
                self._known[tuple(ids)] = ids + cold(self._model, ids, 9)
        namespace = self._random.choice([None, None, None, "salt"])
        return Noted(ids, self._tokenizer, namespace, **given)

    def _add(self, request):
        try:
            self._scheduler.add(request)
        except InvalidValueError as error:
            request.end(error)
            self.happened["refused"] += 1

    def _cancel(self, request):
        if request.outcome is None:
            self._cancelled.add(request)
            running = any(branch.sequence is not None for branch in request.branches)
            self.happened["cancelled while it ran" if running else "cancelled while it waited"] += 1
        self._scheduler.cancel(request)
