"""Random acts on any cache, checked against the plain list of what it was given."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcache import CacheFullError, InvalidValueError, PagedCache, RollbackError
from tests.storage.caches import COPIES, STORED_KINDS
from tests.storage.histories import check_attends_like_the_history


class CacheMachine(RuleBasedStateMachine):
    """Random acts on a cache, and on the plain list of what it was given."""

    @initialize(kind=st.sampled_from(STORED_KINDS))
    def start(self, kind):
        self.kind = kind
        self.cache = kind()
        self.k, self.v = kind.tokens(0)
        self.seed = 0
        self.forks = []  # (cache, keys, values) of those that wait

    def tokens(self, count):
        self.seed += 1
        return self.kind.tokens(count, batch=self.cache.batch_size, seed=self.seed)

    @rule(count=st.integers(0, 9))
    def update(self, count):
        k, v = self.tokens(count)
        if self.kind.capacity and self.cache.seq_len + count > self.kind.capacity:
            with pytest.raises(CacheFullError):
                self.cache.update(k, v)
            return
        self.cache.update(k, v)
        self.k, self.v = torch.cat([self.k, k], dim=2), torch.cat([self.v, v], dim=2)
        if count:
            check_attends_like_the_history(self.cache, self.kind, self.k, self.v, queries=count)

    @rule(count=st.integers(0, 12))
    def rollback(self, count):
        if self.cache.can_rollback(count):
            self.cache.rollback(count)
            length = self.k.shape[2] - count
            self.k, self.v = self.k[:, :, :length], self.v[:, :, :length]
        else:
            with pytest.raises((RollbackError, InvalidValueError)):
                self.cache.rollback(count)

    @rule()
    def reset(self):
        self.cache.reset()
        self.k, self.v = self.k[:, :, :0], self.v[:, :, :0]

    @rule(data=st.data())
    def rebatch(self, data):
        batch = self.cache.batch_size
        index = data.draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=3))
        self.cache.select(index)
        self.k, self.v = self.k[index], self.v[index]

    @rule(data=st.data())
    def reorder(self, data):
        batch = self.cache.batch_size
        index = data.draw(st.lists(st.integers(0, batch - 1), min_size=batch, max_size=batch))
        self.cache.reorder(index)
        self.k, self.v = self.k[index], self.v[index]

    @precondition(lambda self: self.cache.batch_size < 3)
    @rule()
    def repeat(self):
        self.cache.repeat(2)
        self.k, self.v = self.k.repeat_interleave(2, 0), self.v.repeat_interleave(2, 0)

    @rule(way=st.sampled_from(sorted(COPIES)))
    def continue_with_a_copy(self, way):
        old = self.cache
        self.cache = COPIES[way](old)
        if old.seq_len + 2 <= (self.kind.capacity or 1000):
            old.update(*self.tokens(2))

    @precondition(lambda self: len(self.forks) < 3)
    @rule()
    def fork(self):
        self.forks.append((self.cache.fork(), self.k, self.v))

    @precondition(lambda self: self.forks)
    @rule(data=st.data())
    def continue_with_a_fork(self, data):
        index = data.draw(st.integers(0, len(self.forks) - 1))
        waiting = self.cache, self.k, self.v
        self.cache, self.k, self.v = self.forks[index]
        self.forks[index] = waiting

    @precondition(lambda self: self.forks)
    @rule()
    def let_a_fork_go(self):
        self.forks.pop()

    @invariant()
    def forks_are_as_they_were(self):
        for cache, k, _ in self.forks:
            assert cache.seq_len == k.shape[2]
            kept = cache.decoded_rows()[0]
            newest = kept.shape[2] - min(self.kind.sinks, kept.shape[2])
            assert torch.equal(kept[:, :, kept.shape[2] - newest :], k[:, :, k.shape[2] - newest :])

    @invariant()
    def lengths_agree(self):
        assert self.cache.seq_len == self.k.shape[2]
        assert self.cache.state["k"].shape[2] == self.cache.stored_len
        assert self.cache.stored_nbytes <= self.cache.nbytes

    @invariant()
    def blocks_are_held_by_those_that_name_them(self):
        if isinstance(self.cache, PagedCache):
            self.cache.check()

    @invariant()
    def the_next_token_sees_what_the_rule_says(self):
        if self.kind.capacity == self.cache.seq_len:
            return
        probe = self.cache.copy()
        k, v = self.kind.tokens(1, batch=probe.batch_size, seed=12345)
        probe.update(k, v)
        history = torch.cat([self.k, k], dim=2), torch.cat([self.v, v], dim=2)
        check_attends_like_the_history(probe, self.kind, *history)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
