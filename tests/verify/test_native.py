"""The decode path over a pool is judged as caches are: no false alarm, and no fault that passes."""

import pytest
import torch

from kvcache import InvalidTypeError, InvalidValueError, NotSupportedError
from kvcache.decoder import FewRows, ManyRows
from kvcache.verify import NativePoolDecoder, Verdict, verify
from tests.hf.tiny_models import gemma, gemma2, gemma3, gpt2, llama, mistral, qwen2, qwen3, t5
from tests.kernels import needs_kernels

pytestmark = [needs_kernels, pytest.mark.usefixtures("one_thread")]

MODELS = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3": gemma3,
}
GROUPS = {"intermediate_size": 64, "head_dim": 16, "initializer_range": 0.1}  # whole groups of 32, for int8


def verdicts(report):
    return {finding.scenario: finding.verdict for finding in report.findings}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", MODELS)
def test_what_is_right_gives_no_alarm(family, dtype):
    report = verify(NativePoolDecoder(MODELS[family](dtype)))
    assert report.is_right, str(report)
    not_run = [name for name, verdict in verdicts(report).items() if verdict is Verdict.NOT_RUN]
    assert not_run == (["window wrap-around"] if family in ("llama", "qwen3", "gemma") else [])
    assert all(finding.reason is None for finding in report.findings if finding.verdict is not Verdict.NOT_RUN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("storage", [None, "int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_int8_weights_and_quantised_rows_are_lossy_as_configured(family, storage, dtype):
    decoder = NativePoolDecoder(MODELS[family](dtype, **GROUPS), storage=storage, weights="int8")
    report = verify(decoder)
    assert set(verdicts(report).values()) - {Verdict.NOT_RUN} == {Verdict.LOSSY}, str(report)
    first = report.findings[0]
    assert 0 < first.loss.kl_divergence < (0.01 if storage == "int4" else 0.001)
    assert first.loss.top1_agreement > (0.6 if storage == "int4" else 0.9)
    assert first.cached_error == pytest.approx(first.uncached_error, rel=0.7)  # both run what the codes stand for


@pytest.mark.parametrize("storage", ["int8", "int8/int4", "bfloat16"])
def test_quantised_rows_alone_are_lossy_as_configured(storage):
    report = verify(NativePoolDecoder(gemma3(torch.float32), storage=storage))
    assert set(verdicts(report).values()) == {Verdict.LOSSY}, str(report)


@pytest.mark.parametrize("options", [{}, {"weights": "int8"}, {"storage": "int8"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_small_fault_in_steps_of_many_tokens_is_found(monkeypatch, dtype, options):
    computed = ManyRows._computed
    monkeypatch.setattr(ManyRows, "_computed", lambda *arguments: 1.02 * computed(*arguments))
    report = verify(NativePoolDecoder(llama(dtype, **GROUPS), **options))
    assert verdicts(report)["prefill, then decode"] is Verdict.CORRUPT, str(report)
    assert verdicts(report)["one token at a time"] is not Verdict.CORRUPT, str(report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_fault_in_steps_of_few_tokens_is_found(monkeypatch, dtype):
    run = FewRows.run
    monkeypatch.setattr(FewRows, "run", lambda self, step, places=None: 1.02 * run(self, step, places))
    report = verify(NativePoolDecoder(llama(dtype)))
    assert verdicts(report)["one token at a time"] is Verdict.CORRUPT, str(report)


def test_the_model_is_left_as_it_was():
    model = llama(torch.bfloat16, **GROUPS)
    before = {name: weights.clone() for name, weights in model.state_dict().items()}
    assert verify(NativePoolDecoder(model, weights="int8")).is_right
    assert all(torch.equal(weights, before[name]) for name, weights in model.state_dict().items())


def test_models_that_it_does_not_take_are_refused():
    with pytest.raises(NotSupportedError, match="the model is a GPT2LMHeadModel; expected one of LlamaForCausalLM"):
        NativePoolDecoder(gpt2(torch.float32))
    with pytest.raises(InvalidTypeError, match="an encoder-decoder"):
        NativePoolDecoder(t5(torch.float32))
    with pytest.raises(InvalidValueError, match="weights is 'int4'; expected None or 'int8'"):
        NativePoolDecoder(llama(torch.float32), weights="int4")
    with pytest.raises(InvalidValueError, match="storage is 'int3'"):
        NativePoolDecoder(llama(torch.float32), storage="int3")
