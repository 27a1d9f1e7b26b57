"""Every family of models, every way to generate, through the model's own attention and through `use_attention`."""

from contextlib import contextmanager
from functools import cache, partial

import pytest
import torch

from kvcache.hf import cache_for, use_attention
from tests.hf.runs import assert_same_logits, generate, ids_of, left_padded, logits_of
from tests.hf.tiny_models import ALL_FAMILIES, ENCODER_DECODERS

pytestmark = pytest.mark.usefixtures("one_thread", "softmax_in_float64")

NEW = 12
ONCE, TWICE = ids_of(10), ids_of(6).repeat(1, 2)  # the second has something to look up
PADDED, MASK = left_padded((5, 11, 8), seed=4)
OTHER_WEIGHTS = object()
MODES = {
    "greedy": (ONCE, {}),
    "beams": (ONCE, {"num_beams": 3}),
    "sampling": (ONCE, {"do_sample": True, "top_k": 30}),
    "several": (ONCE, {"do_sample": True, "num_return_sequences": 3}),
    "prompt lookup": (TWICE, {"prompt_lookup_num_tokens": 4}),
    "assisted": (TWICE, {"assistant_model": OTHER_WEIGHTS}),
    "left-padded": (PADDED, {"attention_mask": MASK}),
    "in chunks": (ONCE, {"prefill_chunk_size": 4}),
}
ENCODER_DECODER_MODES = {
    "greedy": (ONCE, {}),
    "beams": (ONCE, {"num_beams": 3}),
    "sampling": (ONCE, {"do_sample": True}),
    "padded": (PADDED, {"attention_mask": MASK, "do_sample": True}),  # greedy text hardly varies here
}
MODELS = ALL_FAMILIES | ENCODER_DECODERS
MODES_OF = dict.fromkeys(ALL_FAMILIES, MODES) | dict.fromkeys(ENCODER_DECODERS, ENCODER_DECODER_MODES)

# "blocks" is "kvcache" over a cache of blocks, which beams and repeated rows share.
ATTENTIONS = ("model's own", "kvcache", "blocks")
# Here blocks change nothing: all layers slide, or attention does not read the store.
WITHOUT_BLOCKS = {"mistral", "phi3", "deepseek_v3"}
# The models that do not read the store; these warnings from any other family are errors.
DECODED = {
    # It makes its keys and values of what the cache returns.
    "deepseek_v3": pytest.mark.filterwarnings("ignore:the model does something with a layer's keys:UserWarning"),
    "t5": pytest.mark.filterwarnings("ignore:attention under position_bias is PyTorch's:UserWarning"),
}


def every(*cases):
    """Parametrise by these cases, which begin with a family, and by attention."""
    return pytest.mark.parametrize(
        ("case", "attention"),
        [
            pytest.param(case, attention, id=", ".join((*case, attention)), marks=DECODED.get(case[0], ()))
            for case in cases
            for attention in ATTENTIONS
            if attention != "blocks" or case[0] not in WITHOUT_BLOCKS
        ],
    )


@pytest.fixture(scope="module", autouse=True)
def forget():
    yield
    for kept in (model_of, own_text, logits_without_a_cache):
        kept.cache_clear()


@cache
def model_of(family, seed=0):
    return MODELS[family](seed=seed)


def text_of(family, mode, kv_cache):
    """Return the new tokens."""
    ids, options = MODES_OF[family][mode]
    if options.get("assistant_model") is OTHER_WEIGHTS:
        options = {"assistant_model": model_of(family, seed=5)}
    text = generate(model_of(family), ids, kv_cache, NEW, **options)
    return text[:, -NEW:]


@cache
def own_text(family, mode):
    """Return the new tokens with transformers' own cache, which is right in all these cases: as without a cache."""
    return text_of(family, mode, "own")


@contextmanager
def empty_cache(family, attention):
    """Give an empty cache; within the context the model has this attention."""
    model = model_of(family)
    if attention == "model's own":
        yield cache_for(model)
        return
    with use_attention(model):
        yield cache_for(model, block_size=4) if attention == "blocks" else cache_for(model)


@every(*((family, mode) for family, modes in MODES_OF.items() for mode in modes))
def test_the_text_is_that_of_transformers_own_cache(case, attention):
    expected = own_text(*case)
    assert min(len(set(row.tolist())) for row in expected) > 3  # it varies
    with empty_cache(case[0], attention) as kv_cache:
        assert torch.equal(text_of(*case, kv_cache), expected)


def run_of(family):
    """Return a function from ids to logits, ids (3, 24), and their mask; of an encoder-decoder, the decoder's."""
    model = model_of(family)
    if family in ALL_FAMILIES:
        return model, *left_padded((24, 15, 20))

    def decode(ids, **options):
        return model(input_ids=PADDED, attention_mask=MASK, decoder_input_ids=ids, **options)

    return decode, ids_of(24, batch=3), None


@cache
def logits_without_a_cache(family):
    run, ids, mask = run_of(family)
    return logits_of(partial(run, use_cache=False), ids, (24,), None, mask)


@every(*((family,) for family in MODELS))
def test_chunked_logits_are_those_of_one_pass(case, attention):
    """Float64, to 1e-12: single tokens and chunks, shorter and longer than the window, one of them all padding."""
    (family,) = case
    run, ids, mask = run_of(family)
    expected = logits_without_a_cache(family)
    real = torch.ones_like(ids) if mask is None else mask
    with empty_cache(family, attention) as kv_cache:
        logits = logits_of(run, ids, (7, 1, 1, 3, 1, 9, 2), kv_cache, mask)
    assert_same_logits(logits[real == 1], expected[real == 1])
