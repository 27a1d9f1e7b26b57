"""Acts on a pool with a prefix cache, chosen by hypothesis and by chance, each checked against plain lists."""

import random

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcache.prefix import Media
from tests.oracle import assert_close, attend_rows
from tests.prefix.checked_prefixes import DIGESTS, ENDS, NAMESPACES, POLICIES, SPECS, CheckedPrefixes
from tests.prefix.random_prefix_acts import MAX_TEXTS, TOKENS, TRUNKS, random_act
from tests.prefix.state_rows import STATE_BITS, StateRows

layers, policies = st.sampled_from(list(SPECS)), st.sampled_from(list(POLICIES))
places = st.integers(0, MAX_TEXTS - 1)
some_places = st.lists(places, min_size=1, max_size=3)
counts = st.tuples(*[st.sampled_from([1, 1, 2, 3, 4, 7])] * 3)
namespaces = st.integers(0, len(NAMESPACES) - 1)
tails = st.lists(st.sampled_from(TOKENS), max_size=3)
beginnings = st.tuples(st.sampled_from(TRUNKS), st.integers(0, 12)).map(lambda drawn: drawn[0][: drawn[1]])
texts = st.tuples(beginnings, tails).map(lambda parts: parts[0] + parts[1]).filter(bool)
has_room = precondition(lambda self: len(self.checked.texts) < MAX_TEXTS)
has_idle = precondition(lambda self: self.checked.idle)
has_step = precondition(lambda self: self.checked.steps)


pytestmark = pytest.mark.usefixtures("one_thread")


class PrefixMachine(RuleBasedStateMachine):
    """Acts on a pool and on the lists beside it; a text or step is picked by its place, modulo how many there are."""

    @initialize(layers=layers, policy=policies)
    def begin(self, layers, policy):
        self.checked = CheckedPrefixes(layers, policy)

    def idle(self, place):
        return self.checked.idle[place % len(self.checked.idle)]

    def opened(self, place):
        return self.checked.steps[place % len(self.checked.steps)]

    def open(self, chosen, num_tokens):
        """Start a step in which texts go on as they were asked for, and then in some way of their own."""
        members = list(dict.fromkeys(self.idle(place) for place in chosen))
        new = [
            (text.asked[len(text.ids) :] + [1] * count)[:count]
            for text, count in zip(members, num_tokens, strict=False)
        ]
        return self.checked.begin(members, new)

    @has_room
    @rule(ids=texts, namespace=namespaces, medium=st.none() | st.tuples(places, places, st.sampled_from(DIGESTS)))
    def acquire(self, ids, namespace, medium):
        media = []
        if medium is not None and medium[0] < len(ids):
            start, num_more, digest = medium
            media.append(Media(start, min(start + 1 + num_more, len(ids)), digest))
        self.checked.acquire(ids, namespace, media)

    @has_room
    @rule(ids=texts, namespace=namespaces, chunk=st.sampled_from([1, 2, 5, 20]), max_reused=st.none() | places)
    def acquire_run_publish_and_free(self, ids, namespace, chunk, max_reused):
        text = self.checked.acquire(ids, namespace, max_reused=max_reused)
        while len(text.ids) < len(ids):
            opened = self.checked.begin([text], [ids[len(text.ids) :][:chunk]])
            if opened is None:
                break
            self.checked.run(opened, "commit")
        self.checked.publish(text)
        self.checked.free(text)

    @has_room
    @has_idle
    @rule(place=places)
    def fork(self, place):
        self.checked.fork(self.idle(place))

    @precondition(lambda self: self.checked.texts)
    @rule(place=places)
    def publish(self, place):
        self.checked.publish(self.checked.texts[place % len(self.checked.texts)])

    @has_idle
    @rule(place=places)
    def free(self, place):
        self.checked.free(self.idle(place))

    @has_idle
    @rule(place=places, n=st.integers(0, 12))
    def rollback(self, place, n):
        self.checked.rollback(self.idle(place), n)

    @has_idle
    @rule(chosen=some_places, num_tokens=counts, end=st.sampled_from(["commit", *ENDS]), num_layers=st.integers(0, 2))
    def step(self, chosen, num_tokens, end, num_layers):
        opened = self.open(chosen, num_tokens)
        if opened:
            self.checked.run(opened, end, num_layers)

    @has_idle
    @rule(chosen=some_places, num_tokens=counts)
    def open_step(self, chosen, num_tokens):
        self.open(chosen, num_tokens)

    @has_step
    @rule(place=places)
    def append(self, place):
        opened = self.opened(place)
        if opened.num_layers < len(self.checked.spec.layers):
            self.checked.append(opened)

    @has_step
    @rule(place=places, keep=st.none() | st.tuples(*[st.integers(0, 7)] * 3))
    def commit(self, place, keep):
        opened = self.opened(place)
        if keep is not None:
            keep = [min(count, len(ids)) for count, ids in zip(keep, opened.new_ids, strict=False)]
        self.checked.commit(opened, keep)

    @has_step
    @rule(place=places)
    def abort(self, place):
        self.checked.abort(self.opened(place))

    @rule(num_blocks=st.integers(0, 20), place=places)
    def evict(self, num_blocks, place):
        kinds = list(self.checked.num_blocks)
        self.checked.evict(num_blocks, kinds[place % len(kinds)])

    @rule(namespace=st.none() | namespaces)
    def invalidate(self, namespace):
        self.checked.invalidate(namespace)

    @rule(through_data=st.booleans())
    def change_weights(self, through_data):
        self.checked.change_weights(through_data)

    @rule()
    def switch(self):
        self.checked.switch()

    @invariant()
    def everything_is_what_the_lists_say(self):
        self.checked.check()

    def teardown(self):
        self.checked.close()


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("layers", SPECS)
def test_random_acts_leave_what_the_lists_say(layers, policy):
    rng, checked = random.Random(0), CheckedPrefixes(layers, policy)
    for _ in range(1000):
        random_act(checked, rng)
        checked.check()
    checked.close()
    assert checked.counts["steps refused"] > 10
    assert checked.counts["texts of which tokens were found"] > 30
    assert checked.counts["texts of which tokens had to be found"] > 2


@pytest.mark.parametrize("layers", SPECS)
@pytest.mark.parametrize(("length", "count"), [(1, 1), (9, 9), (9, 2)])
def test_attention_over_states_is_the_oracle(layers, length, count):
    generator = np.random.default_rng(length)
    states = generator.integers(0, 1 << STATE_BITS, length)
    for seed, layer in enumerate(SPECS[layers].layers):
        rows = StateRows(layer, seed)
        q, k, v = rows.queries(states), rows.keys(states), rows.values(states)
        q, k, v = (torch.from_numpy(part).transpose(0, 1)[None] for part in (q[-count:], k, v))
        expected, _ = attend_rows(q, k, v, window=layer.window, sinks=layer.sinks)
        assert_close(torch.from_numpy(rows.attention(states, count)).transpose(0, 1), expected[0])
