"""What an engine runs its model through, and that a text is the same whichever it is."""

import copy
import random
import warnings

import pytest
import torch
from torch import nn

from kvcache import InvalidValueError, NotSupportedError
from kvcache.engine import Engine
from kvcache.hf import NativeDecoder
from tests.engine.engines import check_idle, scheduler_of
from tests.engine.proposals import repeating, repetitive
from tests.engine.texts import ids_of
from tests.engine.workloads import run_workload
from tests.hf.runs import decoded_model
from tests.hf.tiny_models import gemma3, gpt2, llama
from tests.kernels import needs_kernels

pytestmark = [needs_kernels, pytest.mark.usefixtures("one_thread")]

FLOAT32 = torch.float32
OWN = "kvcache's own decoder"
WHOLE_GROUPS = {"intermediate_size": 64}  # of 32, for int8
NEW = 24


class OtherLinear(nn.Linear):
    pass


@pytest.fixture(scope="module")
def model():
    return llama(FLOAT32)


@pytest.fixture
def engine_of(tokenizer):
    """Make engines, which are closed in the end."""
    engines = []

    def make(model, **options):
        engines.append(Engine(model, tokenizer, **{"num_tokens": 200, "block_size": 4} | options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def greedy(model, ids, count=NEW):
    return model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False)[0, len(ids) :].tolist()


def generated(engine, ids, count=NEW, **options):
    return engine.generate(ids, max_new_tokens=count, **options).token_ids


def exchange_linear(model, linear=nn.Linear):
    part = model.model.layers[0].mlp
    torch.manual_seed(4)
    part.down_proj = linear(part.down_proj.in_features, part.down_proj.out_features, bias=False)


# What runs a model.


def test_a_model_that_fits_runs_through_the_kernels(engine_of, model, monkeypatch):
    engine = engine_of(model)
    assert engine.runs_through == OWN
    monkeypatch.setattr(type(model), "forward", None)  # any use of it fails
    assert len(generated(engine, ids_of(9))) == NEW


@pytest.mark.parametrize(
    ("make", "dtype", "reason"),
    [
        (gpt2, FLOAT32, "the model is a GPT2LMHeadModel; expected one of LlamaForCausalLM, "),
        (llama, torch.float64, "model.layers.0.self_attn.q_proj.weight is torch.float64; expected float32, "),
    ],
    ids=["GPT-2", "float64"],
)
def test_another_runs_through_transformers_and_the_engine_says_why(engine_of, make, dtype, reason):
    model, ids = make(dtype), ids_of(9)
    engine = engine_of(model)
    assert engine.runs_through.startswith(f"transformers' forward: {reason}")
    assert "through transformers' forward, " in repr(engine)
    assert generated(engine, ids) == greedy(model, ids)


@pytest.mark.parametrize("make", [llama, gemma3], ids=["full", "sliding"])
def test_a_text_is_that_of_transformers(engine_of, make):
    model = make(FLOAT32)
    engine = engine_of(model)
    assert engine.runs_through == OWN
    for length in (1, 9, 40):
        assert generated(engine, ids_of(length)) == greedy(model, ids_of(length))
    check_idle(engine)


# int8 weights.


def test_int8_weights_give_the_text_of_the_weights_that_their_codes_stand_for(engine_of):
    model, ids = llama(FLOAT32, seed=3, **WHOLE_GROUPS), ids_of(9)
    expected = greedy(decoded_model(model), ids)
    assert expected != greedy(model, ids)
    engine = engine_of(model, weights="int8")
    assert engine.runs_through == f"{OWN}, weights in int8"
    assert f"through {OWN}, weights in int8, " in repr(engine)
    assert generated(engine, ids) == expected


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: gpt2(FLOAT32), "the model is a GPT2LMHeadModel"),
        (lambda: llama(torch.float64, **WHOLE_GROUPS), "is torch.float64; expected float32"),
        (lambda: llama(FLOAT32), "layer 0, down has 48 columns; int8 weights take multiples of 32"),
    ],
    ids=["GPT-2", "float64", "columns"],
)
def test_int8_weights_of_a_model_that_cannot_have_them_are_refused(engine_of, make, reason):
    with pytest.raises(NotSupportedError, match=reason):
        engine_of(make(), weights="int8")


@pytest.mark.usefixtures("no_kernels")
def test_int8_weights_without_kernels_are_refused(engine_of):
    with pytest.raises(NotSupportedError, match="the native CPU kernels are not there"):
        engine_of(llama(FLOAT32, **WHOLE_GROUPS), weights="int8")


def test_other_weights_are_unknown(engine_of, model):
    with pytest.raises(InvalidValueError, match="weights is 'int4'; expected None or 'int8'"):
        engine_of(model, weights="int4")


# Models that change between two requests.


def test_a_matrix_exchanged_for_another_is_read_anew(engine_of):
    model, ids = llama(FLOAT32), ids_of(9)
    engine, before = engine_of(model), greedy(model, ids)
    assert generated(engine, ids) == before
    exchange_linear(model)
    expected = greedy(model, ids)
    assert expected != before
    assert generated(engine, ids) == expected
    assert engine.runs_through == OWN


def test_a_prompt_of_one_token_behind_an_exchange_leaves_no_old_rows_to_be_found(engine_of):
    """The decoder looks at the model for each new text, as the prefix cache does; else once in 8 steps."""
    model, ids = llama(FLOAT32), ids_of(9)
    engine = engine_of(model, block_size=1)
    generated(engine, ids, count=1)  # a look, and no step of a single token since
    exchange_linear(model)
    text = ids[:1] + generated(engine, ids[:1], count=4)
    assert generated(engine, text + ids) == greedy(model, text + ids)


def test_a_matrix_exchanged_for_one_of_another_class_lets_transformers_go_on_with_one_warning(engine_of):
    model, ids = llama(FLOAT32), ids_of(9)
    engine = engine_of(model)
    generated(engine, ids)
    exchange_linear(model, OtherLinear)
    reason = r"model\.layers\.0\.mlp\.down_proj is a OtherLinear; expected a torch\.nn\.Linear"
    with pytest.warns(UserWarning, match=f"the model was changed, .* from now on: {reason}") as caught:
        assert generated(engine, ids) == greedy(model, ids)
    assert sum("the model was changed" in str(warning.message) for warning in caught) == 1
    assert engine.runs_through.startswith("transformers' forward: model.layers.0.mlp.down_proj is a OtherLinear")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert generated(engine, ids_of(5, seed=2)) == greedy(model, ids_of(5, seed=2))
    check_idle(engine)


def test_a_matrix_exchanged_for_one_of_another_class_ends_requests_for_int8(engine_of):
    model = llama(FLOAT32, **WHOLE_GROUPS)
    engine = engine_of(model, weights="int8")
    exchange_linear(model, OtherLinear)
    for _ in range(2):
        with pytest.raises(NotSupportedError, match="down_proj is a OtherLinear"):
            generated(engine, ids_of(9))
    check_idle(engine)


# Many texts, and tokens that are proposed.


def test_proposed_tokens_change_no_text(engine_of):
    model = repetitive("llama").float()
    engine = engine_of(model)
    assert engine.runs_through == OWN
    num_accepted = num_rejected = 0
    for ids in (repeating(model), 3 * ids_of(6), [*ids_of(6), *ids_of(6)[:3], 5]):
        expected = generated(engine, ids)
        completion = engine.generate(ids, max_new_tokens=NEW, prompt_lookup_num_tokens=5)
        assert completion.token_ids == expected == greedy(model, ids)
        num_accepted += completion.speculation.num_accepted
        num_rejected += completion.speculation.num_proposed - completion.speculation.num_accepted
    assert num_accepted > 0
    assert num_rejected > 0
    check_idle(engine)


@pytest.mark.parametrize("make", [llama, gemma3], ids=["full", "sliding"])
def test_texts_that_share_and_displace_each_other_are_those_of_transformers(engine_of, make):
    model, picks = make(FLOAT32), random.Random(3)
    beginnings = [ids_of(length, seed=length) for length in (4, 9, 16)]
    prompts = [picks.choice(beginnings) + ids_of(picks.randint(1, 6), seed=picks.randint(0, 3)) for _ in range(14)]
    counts = [picks.randint(1, 20) for _ in prompts]
    engine = engine_of(model, num_tokens=60, block_size=2, max_step_tokens=7, storage="float32")
    assert engine.runs_through == OWN
    jobs = [engine.submit(ids, max_new_tokens=count) for ids, count in zip(prompts, counts, strict=True)]
    for job, ids, count in zip(jobs, prompts, counts, strict=True):
        assert job.result()[0].token_ids == greedy(model, ids, count)
    assert scheduler_of(engine).num_preemptions > 0
    assert engine.statistics.num_hits > 0
    check_idle(engine)


@pytest.mark.parametrize("seed", range(6))
def test_random_workloads_by_few_rows_and_many(model, tokenizer, seed):
    decoder = NativeDecoder(model, many_from=4)
    run_workload(model, tokenizer, seed, {}, decoder.forward_step)


def test_a_copy_of_a_model_is_another_model(engine_of, model):
    engine = engine_of(copied := copy.deepcopy(model))
    exchange_linear(copied)
    assert generated(engine_of(model), ids_of(9)) == greedy(model, ids_of(9))
    assert generated(engine, ids_of(9)) == greedy(copied, ids_of(9))
