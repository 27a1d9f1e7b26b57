"""The verdicts on decoders that are right, what is not run, and what is refused."""

import copy
import gc
import json

import pytest
import torch
from torch import nn
from transformers.cache_utils import DynamicLayer

from kvcache import (
    CausalSelfAttentionWithCache,
    InvalidTypeError,
    InvalidValueError,
    KVCache,
    NotSupportedError,
    PagedCache,
)
from kvcache.verify import Decoder, HuggingFaceDecoder, Verdict, verification, verify
from tests.hf.tiny_models import bart, gpt2, llama
from tests.verify.faulty_caches import CrossedHeads, factory
from tests.verify.faulty_decoder import FaultyDecoder

pytestmark = pytest.mark.usefixtures("one_thread")


class OneLayer(Decoder):
    """The attention module behind an embedding, over a cache of one layer of any class."""

    def __init__(self, make_cache, vocab_size=50, **options):
        attention = CausalSelfAttentionWithCache(d_model=32, num_heads=4, num_kv_heads=2)
        self.module = nn.Sequential(nn.Embedding(vocab_size, 32), attention)
        self.vocab_size = vocab_size
        self.make_cache, self.options = make_cache, options

    def new_cache(self, batch_size, capacity):
        return self.make_cache(batch_size, 2, 8, dtype=self.dtype, max_seq_len=capacity, **self.options)

    def forward(self, tokens, cache=None, padding=None):
        if padding is not None:
            raise NotSupportedError("the module has no padding")
        embedding, attention = self.module
        return attention(embedding(tokens), cache, use_cache=cache is not None)[0]

    def rollback(self, cache, num_tokens):
        cache.rollback(num_tokens)

    def reorder(self, cache, index):
        cache.reorder(index)


def verdicts(report):
    return {finding.scenario: finding.verdict for finding in report.findings}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("make_cache", "options"), [(KVCache, {}), (PagedCache, {"block_size": 4})])
def test_the_attention_module_is_right_with_each_cache(make_cache, options, dtype):
    decoder = OneLayer(make_cache, **options)
    decoder.module.to(dtype)
    report = verify(decoder)
    assert report.is_right, str(report)
    not_run = {finding.scenario: finding.reason for finding in report.findings if finding.verdict is Verdict.NOT_RUN}
    assert not_run == {"left-padded batch": "the module has no padding", "window wrap-around": "no layer has a window"}


@pytest.mark.parametrize("window", [None, 3, 11])
def test_a_right_decoder_of_ones_own_is_right(window):
    report = verify(FaultyDecoder(window=window))
    assert report.is_right, str(report)
    assert (verdicts(report)["window wrap-around"] is Verdict.NOT_RUN) == (window is None)


def test_float64_rounds_by_less_than_float32_could():
    report = verify(HuggingFaceDecoder(llama()))
    assert report.is_right
    errors = [finding.cached_error for finding in report.findings if finding.verdict is not Verdict.NOT_RUN]
    assert len(errors) == 10
    assert 0 < max(errors) < 1e-12


def test_a_lossy_cache_is_held_against_rows_rounded_as_it_rounds_them():
    report = verify(HuggingFaceDecoder(llama(torch.float32), storage="int8", attention=True))
    assert set(verdicts(report).values()) == {Verdict.LOSSY, Verdict.NOT_RUN}
    first = report.findings[0]
    assert 0 < first.loss.kl_divergence < 0.1
    assert first.loss.top1_agreement > 0.9
    assert first.cached_error == pytest.approx(first.uncached_error, rel=0.5)  # both round


class Dropping(FaultyDecoder):
    """Loses a hundredth of the newest value."""

    def _through_cache(self, cache, index, k, v):
        k, v, visible = super()._through_cache(cache, index, k, v)
        return k, torch.cat([v[:, :, :-1], 0.99 * v[:, :, -1:]], dim=2), visible


def test_a_small_fault_does_not_hide_in_16_bits():
    decoder = Dropping()
    decoder.module.bfloat16()
    report = verify(decoder)
    first = report.findings[0]
    assert first.verdict is Verdict.CORRUPT
    assert first.cached_error < 4 * first.uncached_error  # by its size alone it would be rounding


def test_the_same_report_comes_out_again():
    assert str(verify(FaultyDecoder(), seed=3)) == str(verify(FaultyDecoder(), seed=3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("is_right", [True, False])
def test_the_model_is_left_as_it_was(dtype, is_right):
    model = llama(dtype)
    before = copy.deepcopy(model.state_dict())
    decoder = HuggingFaceDecoder(model, attention=True)
    if not is_right:
        decoder = HuggingFaceDecoder(model, factory(CrossedHeads))
    assert verify(decoder).is_right == is_right
    del decoder
    gc.collect()  # caches, whose guard is on the model
    assert model.config._attn_implementation == "sdpa"
    assert all(torch.equal(weights, before[name]) for name, weights in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_what_can_do_nothing_is_not_right():
    class Nothing(FaultyDecoder):
        def forward(self, tokens, cache=None, padding=None):
            if cache is not None:
                raise NotSupportedError("there is none")
            return super().forward(tokens)

    report = verify(Nothing())
    assert not report.is_right
    assert report.summary == "0 of 0 scenarios are right, 11 not run"


def test_an_exception_of_a_rollback_is_an_error_too():
    class Broken(DynamicLayer):
        def crop(self, tokens_to_remove):
            self.no_such_attribute.clear()

    report = verify(HuggingFaceDecoder(llama(torch.float32), factory(Broken)))
    assert verdicts(report)["rollback and retry"] is Verdict.ERROR


def test_numbers_that_are_none_are_null_in_json():
    class NotANumber(FaultyDecoder):
        def forward(self, tokens, cache=None, padding=None):
            outputs = super().forward(tokens, cache, padding)
            return outputs if cache is None else outputs * torch.nan

    report = verify(NotANumber())
    assert not report.is_right
    assert json.loads(report.as_json())["findings"][0]["cached_error"] is None


def test_the_step_is_found_though_some_before_it_were_refused():
    report = verify(FaultyDecoder("stale rows after rollback", "rows stay", window=11))
    corruption = next(finding.corruption for finding in report.findings if finding.corruption)
    assert corruption.layer == 0


def test_dropout_is_off_meanwhile():
    model = llama(torch.float32, attention_dropout=0.5).train()
    model.model.norm.eval()
    assert verify(HuggingFaceDecoder(model)).is_right
    assert model.training
    assert not model.model.norm.training


def test_a_vocabulary_of_one():
    report = verify(HuggingFaceDecoder(llama(torch.float32, vocab_size=1, bos_token_id=0)))
    assert report.is_right, str(report)


def test_a_model_with_few_positions_gets_shorter_texts():
    report = verify(HuggingFaceDecoder(gpt2(torch.float32, n_positions=30)))
    assert report.is_right, str(report)
    with pytest.raises(InvalidValueError, match="the decoder takes 20 tokens; expected at least 24"):
        verify(HuggingFaceDecoder(gpt2(torch.float32, n_positions=20)))


def test_an_exception_is_an_error_and_not_corruption():
    class Raising(FaultyDecoder):
        def reorder(self, cache, index):
            raise IndexError("index 2 is out of bounds")

    report = verify(Raising())
    assert verdicts(report)["reorder"] is Verdict.ERROR
    assert [finding.reason for finding in report.findings if finding.verdict is Verdict.ERROR] == [
        "IndexError: index 2 is out of bounds"
    ]
    assert not report.is_right


def test_without_memory_for_float64_the_reference_is_float32(monkeypatch):
    model = llama(torch.bfloat16)
    num_weights = sum(weights.numel() for weights in model.parameters())
    monkeypatch.setattr(verification, "free_memory", lambda device: 6 * num_weights)
    report = verify(HuggingFaceDecoder(model))
    assert report.reference == "float32 without a cache (too little memory for float64)"
    assert report.is_right
    monkeypatch.setattr(verification, "free_memory", lambda device: num_weights)
    with pytest.raises(InvalidValueError, match=r"the reference needs 0\.0 GB for the weights in float32, 0\.0 GB are"):
        verify(HuggingFaceDecoder(model))
    assert verify(HuggingFaceDecoder(model.float())).is_right  # its own reference


def test_texts_of_ones_own():
    texts = [[1, 2, 3] * 10, [4, 5] * 12, [7] * 40]
    report = verify(FaultyDecoder(), texts=texts)
    assert report.is_right


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([[1] * 30] * 2, r"texts are 2 of \[30, 30\] tokens; expected 3 of at least 24"),
        ([[1] * 30, [1] * 30, [1] * 23], r"texts are 3 of \[30, 30, 23\] tokens; expected 3 of at least 24"),
        ([], r"texts are 0 of \[\] tokens; expected 3 of at least 24"),
        ([[61] * 30] * 3, r"texts\[0\] has ids from 61 to 61; expected 0 to 60"),
    ],
)
def test_texts_that_do_not_fit_are_refused(texts, message):
    with pytest.raises(InvalidValueError, match=message):
        verify(FaultyDecoder(), texts=texts)


@pytest.mark.parametrize(
    ("cache", "error", "message"),
    [
        ("dynamo", InvalidValueError, "cache is 'dynamo'; expected kvcache, dynamic, static or package.module:factory"),
        ("no_such_package:make", InvalidValueError, "'no_such_package:make', which cannot be imported: No module"),
        ("tests.verify.faulty_caches:none", InvalidValueError, "cannot be imported: .* has no attribute 'none'"),
        ("tests.verify.faulty_caches:NOT_A_FUNCTION", InvalidTypeError, "which is a int; expected a function"),
        (3, InvalidTypeError, "cache is a int; expected a name or a function"),
    ],
)
def test_a_cache_that_cannot_be_made_is_refused(cache, error, message):
    with pytest.raises(error, match=message):
        HuggingFaceDecoder(llama(torch.float32), cache)


def test_a_factory_that_returns_something_else_is_refused():
    decoder = HuggingFaceDecoder(llama(torch.float32), "tests.verify.faulty_caches:not_a_cache")
    with pytest.raises(InvalidTypeError, match="the cache factory returned a dict; expected a transformers Cache"):
        verify(decoder)


def test_texts_of_other_types_are_refused():
    with pytest.raises(InvalidTypeError, match="texts is a int; expected 3 lists of token ids"):
        verify(FaultyDecoder(), texts=5)
    with pytest.raises(InvalidTypeError, match=r"texts\[0\] is a int; expected a list of token ids"):
        verify(FaultyDecoder(), texts=[5, 6, 7])


def test_other_arguments_that_do_not_fit_are_refused():
    with pytest.raises(InvalidTypeError, match=r"decoder is a LlamaForCausalLM; expected a kvcache\.verify\.Decoder"):
        verify(llama())
    with pytest.raises(InvalidTypeError, match="model is a BartForConditionalGeneration, an encoder-decoder"):
        HuggingFaceDecoder(bart())
    with pytest.raises(InvalidValueError, match="storage is given with cache = 'static'; it belongs to"):
        HuggingFaceDecoder(llama(), "static", storage="int8")
    with pytest.raises(InvalidValueError, match="is_lossy is given with cache = 'dynamic'; it belongs to a cache of"):
        HuggingFaceDecoder(llama(), "dynamic", is_lossy=True)
    with pytest.raises(InvalidTypeError, match="progress is a int"):
        verify(FaultyDecoder(), progress=3)
