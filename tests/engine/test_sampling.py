"""Tokens are those of transformers' `generate`, draws are a request's own, and log-probabilities the model's."""

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList

from kvcache.engine.sampling import Sampler
from tests.engine.texts import Noted, cold, cold_logits, ids_of, options
from tests.engine.workloads import run, scheduler_of
from tests.hf.tiny_models import gemma3

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
DRAWN = {"do_sample": True, "max_new_tokens": 8, "temperature": 1.5}


def generated(model, ids, **given):
    output = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), do_sample=False, **given)
    return output[0, len(ids) :].tolist()


@pytest.mark.parametrize("penalty", [0.5, 1.3, 5.0])
def test_greedy_text_with_a_repetition_penalty_is_that_of_generate(model, tokenizer, penalty):
    ids = ids_of(6)
    request = Noted(ids, tokenizer, max_new_tokens=12, repetition_penalty=penalty)
    run(scheduler_of(model, max_step_tokens=4), request)
    expected = generated(model, ids, max_new_tokens=12, repetition_penalty=penalty)
    assert request.texts == [expected]
    assert expected != cold(model, ids, 12)


def test_greedy_text_with_min_new_tokens_is_that_of_generate(model, tokenizer):
    ids = ids_of(6)
    free = cold(model, ids, 10)
    ends = free[1:4]  # likeliest before it may end
    given = {"max_new_tokens": 10, "min_new_tokens": 5, "eos_token_id": ends, "repetition_penalty": 1.1}
    request = Noted(ids, tokenizer, **given)
    run(scheduler_of(model), request)
    expected = generated(model, ids, pad_token_id=0, **given)
    assert request.texts == [expected]
    assert not set(ends) & set(expected[:4])


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"temperature": 0.3},
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"temperature": 2.0, "top_k": 30, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.7},
        {"top_k": 1000, "temperature": 0.01},
        {"min_new_tokens": 4, "eos_token_id": [3, 9], "top_p": 0.8},
    ],
    ids=str,
)
def test_tokens_are_drawn_from_what_generate_draws_from(model, given):
    """From the distribution behind the processors that transformers itself makes of the same options."""
    ids, length = ids_of(9), 7
    logits = cold_logits(model, ids[:length], [*ids[length:], 0])[-1].float()
    config = GenerationConfig(do_sample=True, **given)
    model._prepare_special_tokens(config, device=CPU)
    processors = model._get_logits_processor(
        config, input_ids_seq_length=length, logits_processor=LogitsProcessorList(), device="cpu"
    )
    scores = processors(torch.tensor([ids]), logits.clone().unsqueeze(0))
    probabilities = scores.softmax(dim=-1)[0]
    count = 4000
    sampler = Sampler(options(do_sample=True, seed=0, **given), 0, length, CPU)
    drawn = torch.tensor([sampler.pick(logits, ids)[0] for _ in range(count)]).bincount(minlength=len(logits))
    assert drawn[probabilities == 0].sum() == 0
    spread = (count * probabilities * (1 - probabilities)).sqrt()
    assert ((drawn - count * probabilities).abs() <= 5 * spread + 1).all()


def texts_of(model, tokenizer, ids, *others, scheduler=None, **given):
    request = Noted(ids, tokenizer, **given)
    run(scheduler or scheduler_of(model), request, *others)
    return request.texts


def test_a_seed_gives_the_same_text_whatever_runs_beside_it(tokenizer):
    model, ids = gemma3(), ids_of(6)
    others = [Noted(ids_of(9, seed), tokenizer, seed=seed, **DRAWN) for seed in range(4)]
    alone = texts_of(model, tokenizer, ids, seed=5, **DRAWN)
    torch.manual_seed(1)
    assert texts_of(model, tokenizer, ids, *others, seed=5, **DRAWN) == alone
    assert texts_of(model, tokenizer, ids, seed=6, **DRAWN) != alone
    state = torch.random.get_rng_state()
    texts_of(model, tokenizer, ids, **DRAWN)
    assert torch.equal(torch.random.get_rng_state(), state)  # the caller's own draws are left alone


def test_a_seed_gives_the_same_texts_after_preemptions(model, tokenizer):
    given = {"num_return_sequences": 3, "seed": 5, "repetition_penalty": 1.2, "logprobs": 1, **DRAWN}
    alone = Noted(ids_of(6), tokenizer, **given)
    run(scheduler_of(model), alone)
    scheduler = scheduler_of(model, num_blocks=9, block_size=2, max_step_tokens=3)
    request, other = Noted(ids_of(6), tokenizer, **given), Noted(ids_of(7, 3), tokenizer, max_new_tokens=8)
    run(scheduler, other, request)
    assert scheduler.num_preemptions > 2
    assert request.texts == alone.texts
    for one, two in zip(request.outcome, alone.outcome, strict=True):
        assert [each.logprob for each in one.logprobs] == pytest.approx([each.logprob for each in two.logprobs])


def test_texts_of_a_request_are_drawn_each_by_itself(model, tokenizer):
    """Without a seed too; and those of the next seed are others."""
    several = {"num_return_sequences": 4, **DRAWN}
    for seed in (None, 0, 2**64 - 1, 10**30):
        texts = texts_of(model, tokenizer, ids_of(6), seed=seed, **several)
        assert len(set(map(tuple, texts))) == 4
    first = texts_of(model, tokenizer, ids_of(6), seed=1, **several)
    second = texts_of(model, tokenizer, ids_of(6), seed=2, **several)
    assert len(set(map(tuple, first + second))) == 8
    assert texts_of(model, tokenizer, ids_of(6), seed=1, **DRAWN) == first[:1]
    unseeded = [texts_of(model, tokenizer, ids_of(6), **DRAWN) for _ in range(2)]
    assert unseeded[0] != unseeded[1]


@pytest.mark.parametrize("drawn", [False, True])
def test_logprobs_are_those_of_the_logits_of_a_cold_run(model, tokenizer, drawn):
    """Of the model's own logits, before a temperature and what else changes them."""
    given = {"logprobs": 97, "max_new_tokens": 6, "repetition_penalty": 1.5}
    if drawn:
        given |= {"do_sample": True, "temperature": 3.0, "top_k": 40, "seed": 1}
    request = Noted(ids_of(9), tokenizer, **given)
    run(scheduler_of(model, num_blocks=5, max_step_tokens=2), request)
    (new,) = request.texts
    expected = cold_logits(model, request.ids, new).log_softmax(dim=-1)
    found = request.outcome[0].logprobs
    assert len(found) == 6
    for token, row, logprobs in zip(new, expected, found, strict=True):
        assert logprobs.logprob == pytest.approx(float(row[token]), abs=1e-10)
        assert [value for _, value in logprobs.top] == sorted((value for _, value in logprobs.top), reverse=True)
        for other, value in logprobs.top:
            assert value == pytest.approx(float(row[other]), abs=1e-10)
        assert sum(torch.tensor(value, dtype=torch.float64).exp() for _, value in logprobs.top) == pytest.approx(1)


def test_as_many_logprobs_as_were_asked_for(model, tokenizer):
    for number in (0, 1, 3, 1000):
        request = Noted(ids_of(4), tokenizer, max_new_tokens=2, logprobs=number)
        run(scheduler_of(model), request)
        assert [len(logprobs.top) for logprobs in request.outcome[0].logprobs] == [min(number, 97)] * 2
        assert request.texts == [cold(model, request.ids, 2)]
        if number:
            assert [logprobs.top[0][0] for logprobs in request.outcome[0].logprobs] == request.texts[0]
