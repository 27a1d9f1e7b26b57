"""Many texts over one pool: each is what a run of its own without a cache gives, and no block is lost."""

from collections import Counter

import pytest
import torch

from kvcache import InvalidValueError
from kvcache.hf import forward_step
from tests.engine.texts import Noted, cold, ids_of
from tests.engine.workloads import check_left, run, run_workload, scheduler_of
from tests.hf.tiny_models import ALL_FAMILIES

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = ("llama", "mistral", "gemma3", "qwen2", "gpt_oss")  # full, sliding, and three with both
SEEDS = 40  # of each
every_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(scope="module")
def models():
    return {family: ALL_FAMILIES[family]() for family in FAMILIES}


@pytest.fixture(scope="module")
def model(models):
    return models["llama"]


@every_family
def test_f23_random_workloads_over_small_pools_give_the_texts_of_cold_runs(models, tokenizer, family):
    happened, known = Counter(), {}
    for seed in range(SEEDS):
        happened += run_workload(models[family], tokenizer, 1000 * FAMILIES.index(family) + seed, known)
    expected = {"hits", "evicted", "accepted", "rejected", "cancelled while it ran", "cancelled while it waited"}
    if family != "mistral":  # whose texts hold no more than a window, for which there is room more often than not
        expected |= {"preempted", "refused"}
    assert {what for what in expected if not happened[what]} == set()


def test_what_running_prompts_have_yet_to_run_is_not_given_to_others(model, tokenizer):
    """Each takes 6 blocks of 24: of 8 requests 4 run at once, and none has to be preempted."""
    scheduler = scheduler_of(model, num_blocks=24, block_size=4, max_step_tokens=4)
    requests = [Noted(ids_of(20, seed), tokenizer, max_new_tokens=4) for seed in range(8)]
    for request in requests:
        scheduler.add(request)
    most = 0
    while scheduler.step():
        most = max(most, len(scheduler.running))
    assert (most, scheduler.num_preemptions) == (4, 0)
    for request in requests:
        assert request.texts == [cold(model, request.ids, 4)]


@pytest.mark.parametrize("max_step_tokens", [1, 2, 3, 5, 8, 64])
@every_family
def test_prompts_in_parts_of_any_size_are_cold_runs(models, tokenizer, family, max_step_tokens):
    model = models[family]
    requests = [Noted(ids_of(length, seed=length), tokenizer, max_new_tokens=6) for length in (1, 13, 4)]
    run(scheduler_of(model, max_step_tokens=max_step_tokens), *requests)
    for request in requests:
        assert request.texts == [cold(model, request.ids, 6)]


@every_family
def test_j3_a_text_preempted_at_every_token_goes_on_as_if_it_was_not(models, tokenizer, family):
    model, ids, others = models[family], ids_of(10), ids_of(7, seed=2)
    expected, expected_others = cold(model, ids, 8), cold(model, others, 8)
    for index in range(8):
        scheduler = scheduler_of(model, num_blocks=14, block_size=2)
        request, other = (Noted(text, tokenizer, max_new_tokens=8) for text in (ids, others))
        scheduler.add(request)
        scheduler.add(other)
        scheduler.step()
        while len(request.branches[0].new_ids) < index:
            scheduler.step()
        if request.outcome is None:
            scheduler._preempt(request.branches[0])
            scheduler.pool.check()
        run(scheduler)
        assert request.texts == [expected]
        assert other.texts == [expected_others]
        assert scheduler.num_preemptions > 0


def test_j3_a_text_preempted_before_every_step_goes_on(model, tokenizer):
    """J3: as long as it gets a token in between."""
    request = Noted(ids_of(10), tokenizer, max_new_tokens=8)
    scheduler = scheduler_of(model, max_step_tokens=3)
    scheduler.add(request)
    while not scheduler.is_idle:
        scheduler.step()
        if scheduler.running:
            scheduler._preempt(scheduler.running[0])
        scheduler.pool.check()
    assert request.texts == [cold(model, request.ids, 8)]
    check_left(scheduler)


def test_j1_a_request_larger_than_the_pool_is_refused_at_once_and_others_go_on(model, tokenizer):
    scheduler = scheduler_of(model, num_blocks=4, block_size=4)
    first, large, small = (Noted(ids_of(length), tokenizer, max_new_tokens=3) for length in (5, 20, 3))
    scheduler.add(first)
    scheduler.step()
    with pytest.raises(InvalidValueError, match=r"takes 22 tokens, 6 blocks .* at most the 4 that there are"):
        scheduler.add(large)
    run(scheduler, small)
    assert first.texts == [cold(model, first.ids, 3)]
    assert small.texts == [cold(model, small.ids, 3)]


@pytest.mark.parametrize("block_size", [1, 3, 4])
@every_family
def test_a_text_that_just_fits_runs_and_so_does_the_same_again(models, tokenizer, family, block_size):
    """Where the last block is found, there is no room for the copy that is to be written: it is run again."""
    model, ids = models[family], ids_of(14)
    window = max(layer.window or 0 for layer in scheduler_of(model).pool.spec.layers)
    num_blocks = {"full": -(-20 // block_size), "sliding": -(-window // block_size) + 1}
    kinds = scheduler_of(model).pool.spec.kinds
    scheduler = scheduler_of(model, {kind: num_blocks[kind] for kind in kinds}, block_size)
    with pytest.raises(InvalidValueError, match="give the engine more memory"):
        scheduler_of(model, {kind: num_blocks[kind] - 1 for kind in kinds}, block_size).check_fits(20)
    expected = cold(model, ids, 7)
    for count in (7, 7, 4, 7):  # 20 tokens are stored at most
        request, other = Noted(ids, tokenizer, max_new_tokens=count), Noted(ids[:9], tokenizer, max_new_tokens=2)
        run(scheduler, request, other)
        assert request.texts == [expected[:count]]
        assert other.texts == [cold(model, ids[:9], 2)]
    longer = Noted(ids + expected[:5], tokenizer, max_new_tokens=2)
    run(scheduler, longer)
    assert longer.texts == [expected[5:]]


def test_a_pool_of_one_block(model, tokenizer):
    scheduler = scheduler_of(model, num_blocks=1, block_size=16)
    requests = [Noted(ids_of(length), tokenizer, max_new_tokens=4) for length in (5, 5, 13, 12, 13)]
    run(scheduler, *requests)
    for request in requests:
        assert request.texts == [cold(model, request.ids, 4)]


def test_f7_of_a_prompt_that_is_known_all_but_the_last_token_is_reused(model, tokenizer):
    scheduler = scheduler_of(model)
    for length in (3, 4, 5, 8, 9):
        ids = ids_of(length, seed=length)
        for reused in (0, length - 1, length - 1):
            request = Noted(ids, tokenizer, length, max_new_tokens=3)
            run(scheduler, request)
            assert request.texts == [cold(model, ids, 3)]
            assert request.outcome[0].usage.cached_tokens == reused


def test_f14_a_prompt_cancelled_half_way_leaves_nothing_wrong_behind(models, tokenizer):
    model = models["gemma3"]
    scheduler = scheduler_of(model, num_blocks=5, block_size=4, max_step_tokens=4)
    ids, others = ids_of(12), ids_of(13, seed=2)
    half = Noted(ids, tokenizer, max_new_tokens=3)
    scheduler.add(half)
    scheduler.step()
    scheduler.step()
    assert half.branches[0].sequence.seq_len == 8
    scheduler.cancel(half)
    check_left(scheduler)
    assert half.texts == [[]]
    for text in (others, ids, others):
        request = Noted(text, tokenizer, max_new_tokens=3)
        run(scheduler, request)
        assert request.texts == [cold(model, text, 3)]


def test_k3_what_is_cancelled_gives_its_blocks_back_wherever_it_is(model, tokenizer):
    scheduler = scheduler_of(model, num_blocks=12, block_size=2, max_step_tokens=4, max_running=2)
    decoding, prefilling, queued = (Noted(ids_of(9, seed), tokenizer, max_new_tokens=9) for seed in (1, 2, 3))
    for request in (decoding, prefilling, queued):
        scheduler.add(request)
    while len(decoding.branches[0].new_ids) < 2:
        scheduler.step()
    assert prefilling.branches[0].new_ids == []
    assert prefilling.branches[0].sequence is not None
    assert queued.branches[0].sequence is None
    for request in (queued, prefilling, decoding):
        scheduler.cancel(request)
        scheduler.cancel(request)  # a second time changes nothing
        scheduler.pool.check()
    check_left(scheduler)
    assert decoding.texts == [cold(model, decoding.ids, 2)]
    assert [prefilling.texts, queued.texts] == [[[]], [[]]]
    assert {request.outcome[0].finish_reason for request in (queued, prefilling, decoding)} == {"cancelled"}


def test_the_oldest_always_goes_on(model, tokenizer):
    """Each step runs tokens of the oldest request, or ends it, however short blocks are."""
    scheduler = scheduler_of(model, num_blocks=8, block_size=4, max_step_tokens=4)
    requests = [Noted(ids_of(10, seed), tokenizer, max_new_tokens=14) for seed in range(6)]
    for request in requests:
        scheduler.add(request)
    while not scheduler.is_idle:
        oldest = scheduler.requests[0]
        held = oldest.branches[0].sequence
        before = 0 if held is None else held.seq_len
        scheduler.step()
        assert oldest.outcome is not None or oldest.branches[0].sequence.seq_len > before
    assert scheduler.num_preemptions > 0
    for request in requests:
        assert request.texts == [cold(model, request.ids, 14)]
    check_left(scheduler)


@pytest.mark.parametrize("max_running", [1, 2, 3])
def test_no_more_texts_run_at_once_than_may(model, tokenizer, max_running):
    """The texts of one request count too."""
    scheduler = scheduler_of(model, block_size=2, max_running=max_running)
    several = {"num_return_sequences": 5, "do_sample": True, "top_k": 1}
    requests = [Noted(ids_of(5, seed), tokenizer, max_new_tokens=4, **several) for seed in (1, 2)]
    for request in requests:
        scheduler.add(request)
    while not scheduler.is_idle:
        scheduler.step()
        assert len(scheduler.running) <= max_running
        scheduler.pool.check()
    for request in requests:
        assert request.texts == [cold(model, request.ids, 4)] * 5
    check_left(scheduler)


def test_a_request_cancelled_before_its_texts_parted_has_all_of_them(model, tokenizer):
    several = {"num_return_sequences": 3, "do_sample": True, "seed": 1}
    scheduler = scheduler_of(model)
    request = Noted(ids_of(5), tokenizer, max_new_tokens=4, **several)
    scheduler.add(request)
    scheduler.cancel(request)
    assert request.texts == [[], [], []]
    request = Noted(ids_of(5), tokenizer, max_new_tokens=4, **several)
    scheduler.add(request)
    scheduler.step()
    scheduler.cancel(request)
    assert [len(text) for text in request.texts] == [1, 1, 1]
    check_left(scheduler)


def test_texts_of_a_request_end_each_by_itself(model, tokenizer):
    """One ends at its first token, another at its last; the outcome comes with the last one."""
    ids = ids_of(6)
    given = {"num_return_sequences": 4, "do_sample": True, "temperature": 5.0, "seed": 3, "max_new_tokens": 12}
    free = Noted(ids, tokenizer, **given)
    run(scheduler_of(model), free)
    first, second = free.texts[1][0], free.texts[2][4]
    request = Noted(ids, tokenizer, eos_token_id=[first, second], **given)
    run(scheduler_of(model, num_blocks=14, block_size=2), request)
    ends = [next((i + 1 for i, token in enumerate(text) if token in (first, second)), 12) for text in free.texts]
    assert request.texts == [text[:end] for text, end in zip(free.texts, ends, strict=True)]
    assert len(set(ends)) > 1


def test_k8_each_text_stops_at_its_own_end(model, tokenizer):
    """K8: at steps 1, 3 and never."""
    texts = [ids_of(5, seed) for seed in (1, 2, 3)]
    free = [cold(model, ids, 6) for ids in texts]
    ends = [free[0][0], free[1][2], 0]
    assert all(end not in new[:place] for end, new, place in zip(ends, free, (0, 2, 6), strict=True))
    requests = [Noted(ids, tokenizer, max_new_tokens=6, eos_token_id=end) for ids, end in zip(texts, ends, strict=True)]
    run(scheduler_of(model), *requests)
    assert [request.texts[0] for request in requests] == [free[0][:1], free[1][:3], free[2]]
    assert [request.outcome[0].finish_reason for request in requests] == ["stop", "stop", "length"]
    assert [request.outcome[0].usage.completion_tokens for request in requests] == [1, 3, 6]


def test_a_forward_that_fails_ends_the_requests_of_its_step_only(model, tokenizer):
    fails = []

    def forward(step, places):
        logits = forward_step(model, step, places)
        if fails:
            raise fails.pop()
        return logits

    scheduler = scheduler_of(model, max_running=2, forward=forward)
    first, second, later = (Noted(ids_of(5, seed), tokenizer, max_new_tokens=4) for seed in (1, 2, 3))
    for request in (first, second, later):
        scheduler.add(request)
    scheduler.step()
    fails.append(RuntimeError("out of memory"))
    scheduler.step()
    scheduler.pool.check()
    assert str(first.error) == str(second.error) == "out of memory"
    again = Noted(first.ids, tokenizer, max_new_tokens=4)
    run(scheduler, again)
    assert later.texts == [cold(model, later.ids, 4)]
    assert again.texts == [cold(model, first.ids, 4)]


def test_logits_that_are_nan_end_one_request_alone(model, tokenizer):
    bad = ids_of(5, seed=2)

    def forward(step, places):
        logits = forward_step(model, step, places)
        for row, sequence in enumerate(step.sequences):
            if sequence.tokens[:5] == bad or step.tokens[0, : len(bad)].tolist() == bad:
                logits[row, 7] = torch.nan
        return logits

    scheduler = scheduler_of(model, forward=forward, max_step_tokens=5)
    requests = [Noted(ids, tokenizer, max_new_tokens=4) for ids in (ids_of(5), bad, ids_of(5, seed=3))]
    run(scheduler, *requests)
    assert isinstance(requests[1].error, InvalidValueError)
    assert "NaN" in str(requests[1].error)
    for request in (requests[0], requests[2]):
        assert request.texts == [cold(model, request.ids, 4)]


def test_what_cannot_be_drawn_from_ends_one_request_alone(model, tokenizer):
    def forward(step, places):
        logits = forward_step(model, step, places)
        logits[step.last.argmin()] = torch.inf  # of the oldest text
        return logits

    scheduler = scheduler_of(model, forward=forward)
    drawn = Noted(ids_of(5), tokenizer, max_new_tokens=4, do_sample=True)
    other = Noted(ids_of(4, seed=2), tokenizer, max_new_tokens=1)
    run(scheduler, drawn, other)
    assert "logits are infinite" in str(drawn.error)
    assert other.texts == [cold(model, other.ids, 1)]


def test_a_tokenizer_that_fails_ends_one_request_alone(model, tokenizer):
    class Failing:
        def decode(self, ids, **options):
            raise RuntimeError("no such token")

    bad, good = Noted(ids_of(5), Failing(), max_new_tokens=4), Noted(ids_of(5, 2), tokenizer, max_new_tokens=4)
    run(scheduler_of(model), bad, good)
    assert str(bad.error) == "no such token"
    assert good.texts == [cold(model, good.ids, 4)]


def test_a_namespace_that_cannot_be_looked_up_ends_one_request_alone(model, tokenizer):
    bad = Noted(ids_of(5), tokenizer, object(), max_new_tokens=4)
    good = Noted(ids_of(5), tokenizer, "other", max_new_tokens=4)
    run(scheduler_of(model), bad, good)
    assert "namespace" in str(bad.error)
    assert good.texts == [cold(model, good.ids, 4)]


def test_f2_namespaces_share_nothing(model, tokenizer):
    scheduler, cached = scheduler_of(model), []
    for namespace in (None, {"adapter": "X"}, {"salt": "X"}, ("ab", "c"), ("a", "bc"), {"salt": "X"}):
        request = Noted(ids_of(9), tokenizer, namespace, max_new_tokens=2)
        run(scheduler, request)
        cached.append(request.outcome[0].usage.cached_tokens)
    assert cached == [0, 0, 0, 0, 0, 8]


def test_what_texts_begin_with_in_common_is_computed_once_though_they_come_together(model, tokenizer):
    beginning = ids_of(16)
    requests = [Noted(beginning + ids_of(3, seed), tokenizer, max_new_tokens=2) for seed in range(4)]
    scheduler = scheduler_of(model)
    run(scheduler, *requests)
    assert [request.outcome[0].usage.cached_tokens for request in requests] == [0, 16, 16, 16]


def test_one_that_waits_behind_a_large_one_runs_once_that_is_cancelled(model, tokenizer):
    scheduler = scheduler_of(model, num_blocks=8, block_size=4)
    first, large, small = (
        Noted(ids_of(length, length), tokenizer, max_new_tokens=count) for length, count in ((13, 8), (28, 1), (3, 1))
    )
    for request in (first, large, small):
        scheduler.add(request)
    scheduler.step()
    assert scheduler.running == first.branches
    scheduler.cancel(large)
    scheduler.step()
    assert small.texts == [cold(model, small.ids, 1)]
    run(scheduler)
