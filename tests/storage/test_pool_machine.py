"""Acts on a pool that is too small for them, chosen by hypothesis and by chance, each checked against plain lists."""

import random

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.oracle import assert_close, attend_rows
from tests.storage.pools import attend_last
from tests.storage.random_pool_acts import ENDS, CheckedPool, random_act

MAX_TEXTS = 6
places = st.integers(0, MAX_TEXTS - 1)
counts = st.sampled_from([1, 1, 1, 2, 2, 3, 5, 8])
keeps = st.integers(0, 8)
has_room = precondition(lambda self: len(self.checked.texts) < MAX_TEXTS)
has_idle = precondition(lambda self: self.checked.idle)
has_step = precondition(lambda self: self.checked.steps)


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for each other at tiny tensors cost far more than they give."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


class PoolMachine(RuleBasedStateMachine):
    """Acts on a pool and on the lists beside it; a text or step is picked by its place, modulo how many there are."""

    def __init__(self):
        super().__init__()
        self.checked = CheckedPool()

    def idle(self, place):
        return self.checked.idle[place % len(self.checked.idle)]

    def members(self, chosen):
        return list(dict.fromkeys(self.idle(place) for place in chosen))

    @has_room
    @rule()
    def new(self):
        self.checked.new()

    @has_room
    @has_idle
    @rule(place=places)
    def fork(self, place):
        self.checked.fork(self.idle(place))

    @has_idle
    @rule(place=places)
    def free(self, place):
        self.checked.free(self.idle(place))

    @has_idle
    @rule(place=places, n=st.integers(0, 12))
    def rollback(self, place, n):
        self.checked.rollback(self.idle(place), n)

    @has_idle
    @rule(place=places, length=st.integers(0, 20))
    def truncate(self, place, length):
        self.checked.truncate(self.idle(place), length)

    @has_room
    @has_idle
    @rule(place=places, n=st.integers(0, 2), tokens=st.tuples(counts, counts), end=st.sampled_from(ENDS))
    def branch_and_step_together(self, place, n, tokens, end):
        """A fork, a little shorter than its parent, shares the block that both write."""
        text = self.idle(place)
        self.checked.fork(text)
        fork = self.checked.texts[-1]
        self.checked.rollback(fork, min(n, len(text.ids)))
        opened = self.checked.begin([text, fork], tokens)
        if opened:
            self.checked.run(opened, end)

    @has_idle
    @rule(
        chosen=st.lists(places, min_size=1, max_size=3),
        tokens=st.tuples(counts, counts, counts),
        end=st.sampled_from(["commit", *ENDS]),
        num_layers=st.integers(0, 2),
    )
    def step(self, chosen, tokens, end, num_layers):
        members = self.members(chosen)
        opened = self.checked.begin(members, tokens[: len(members)])
        if opened:
            self.checked.run(opened, end, num_layers)

    @has_idle
    @rule(chosen=st.lists(places, min_size=1, max_size=3), tokens=st.tuples(counts, counts, counts))
    def open_step(self, chosen, tokens):
        members = self.members(chosen)
        self.checked.begin(members, tokens[: len(members)])

    @has_step
    @rule(place=places)
    def append(self, place):
        opened = self.checked.steps[place % len(self.checked.steps)]
        if opened.num_layers < 2:
            self.checked.append(opened)

    @has_step
    @rule(place=places, keep=st.none() | st.tuples(keeps, keeps, keeps))
    def commit(self, place, keep):
        opened = self.checked.steps[place % len(self.checked.steps)]
        if keep is not None:
            keep = [min(count, len(ids)) for count, ids in zip(keep, opened.new_ids, strict=False)]
        self.checked.commit(opened, keep)

    @has_step
    @rule(place=places)
    def abort(self, place):
        self.checked.abort(self.checked.steps[place % len(self.checked.steps)])

    @invariant()
    def everything_is_what_the_lists_say(self):
        self.checked.check()

    def teardown(self):
        self.checked.close()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=210, stateful_step_count=50, deadline=None)


def test_random_acts_leave_the_pool_that_the_lists_say():
    rng, checked = random.Random(0), CheckedPool()
    for _ in range(2000):
        random_act(checked, rng, look=True)
        checked.check()
    checked.close()
    assert checked.num_refused > 100


@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (4, 0), (3, 2), (1, 1)])
@pytest.mark.parametrize("length", [1, 2, 9])
def test_the_oracle_without_loops_is_the_oracle(window, sinks, length):
    generator = torch.Generator().manual_seed(length)
    q, k, v = (
        torch.randn(1, heads, length, size, generator=generator, dtype=torch.float64)
        for heads, size in ((4, 3), (2, 3), (2, 5))
    )
    for queries in {1, length}:
        expected, _ = attend_rows(q[:, :, -queries:], k, v, window=window, sinks=sinks)
        assert_close(attend_last(q[0, :, -queries:], k[0], v[0], window, sinks), expected[0])
