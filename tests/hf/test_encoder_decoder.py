"""Models with an encoder: cross-attention rows are written once and follow the batch."""

import pytest
import torch

from kvcache import InvalidValueError
from kvcache.hf import cache_for
from tests.hf.runs import NEW, generate, ids_of
from tests.hf.tiny_models import PAD, bart, t5

pytestmark = pytest.mark.usefixtures("one_thread")
every_encoder_decoder = pytest.mark.parametrize("make", [t5, bart])


@every_encoder_decoder
@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"do_sample": True}, {"num_beams": 4, "num_return_sequences": 2}],
    ids=["greedy", "beams", "sampling", "several beams"],
)
@pytest.mark.parametrize("max_tokens", [None, NEW], ids=["growing", "preallocated"])
def test_d8_encoder_decoder_text_is_that_of_transformers_own_cache(make, options, max_tokens):
    """D8: cross rows are written once, follow the beams, and give the text of transformers' own cache and of none."""
    model, ids = make(), ids_of(7, batch=2)
    cache = cache_for(model, max_tokens)
    text = generate(model, ids, cache, **options)
    assert len(set(text[0].tolist())) > 4
    assert torch.equal(text, generate(model, ids, "own", **options))
    assert torch.equal(text, generate(model, ids, "no", **options))
    assert cache.get_seq_length() == NEW
    assert cache.cross_attention_cache.get_seq_length() == 7
    assert cache.cross_attention_cache.layers[0].rows.k_cache.shape[2] == 7


@every_encoder_decoder
def test_d8_the_padded_length_of_the_encoder_does_not_matter(make):
    """D8: the same encoder input padded to 5 and to 9."""
    model, texts = make(), []
    for length in (5, 9):
        ids, mask = torch.full((2, length), PAD), torch.zeros(2, length, dtype=torch.int64)
        ids[:, :4], mask[:, :4] = ids_of(4, batch=2), 1
        texts.append(generate(model, ids, attention_mask=mask, num_beams=2))
    assert torch.equal(*texts)


@every_encoder_decoder
def test_encoder_decoder_prompt_lookup(make):
    model, ids = make(), ids_of(8)
    assert torch.equal(generate(model, ids, prompt_lookup_num_tokens=3), generate(model, ids, "no"))


@every_encoder_decoder
def test_an_encoder_decoder_cache_is_for_one_input(make):
    """Its cross rows are those of the first input; a second one would silently read them."""
    model = make()
    cache = cache_for(model)
    generate(model, ids_of(7), cache)
    with pytest.raises(InvalidValueError, match=r"the cache holds 16 tokens and belongs to the encoder's last input"):
        generate(model, ids_of(7, seed=3), cache)
    cache.reset()
    assert torch.equal(generate(model, ids_of(5, seed=3), cache), generate(model, ids_of(5, seed=3), "no"))
