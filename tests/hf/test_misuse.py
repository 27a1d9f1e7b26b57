"""What `generate` would silently get wrong with a cache, and refuses with one of ours."""

import pytest
import torch

from kvcache import InvalidValueError
from kvcache.hf import cache_for
from tests.hf.older_releases import since_5_24
from tests.hf.runs import every_family, generate, ids_of

pytestmark = pytest.mark.usefixtures("one_thread")


@every_family
def test_a_prompt_shorter_than_the_cache_is_refused(models, family):
    model = models[family]
    cache = cache_for(model)
    generate(model, ids_of(6), cache, max_new_tokens=4)
    message = r"the cache holds 9 tokens, but the prompt has 4; for another text, reset\(\) the cache or crop\(\) it"
    with pytest.raises(InvalidValueError, match=message):
        generate(model, ids_of(4), cache)
    assert cache.get_seq_length() == 9
    cache.reset()
    assert torch.equal(generate(model, ids_of(4), cache), generate(model, ids_of(4), "no"))


@every_family
def test_another_prompt_on_a_used_cache_is_refused(models, family):
    model = models[family]
    cache = cache_for(model)
    generate(model, ids_of(6), cache, max_new_tokens=4)
    for count in (9, 14):
        with pytest.raises(InvalidValueError, match="the cache holds 9 tokens, but the prompt begins with other ones"):
            generate(model, ids_of(count, seed=3), cache)
    assert cache.get_seq_length() == 9


@every_family
def test_a11_new_ids_with_a_mask_that_does_not_cover_all_are_refused(models, family):
    """A11: cache of 6, ids of 1 and a mask of 6 (should be 7), through generate, padded or not."""
    model, ids = models[family], ids_of(7)
    for mask in (torch.ones(1, 6, dtype=torch.int64), torch.tensor([[0, 1, 1, 1, 1, 1]])):
        cache = cache_for(model)
        with torch.no_grad():
            model(ids[:, :6], cache=cache)
        with pytest.raises(InvalidValueError, match="covers 6 tokens; expected 7: 6 in the cache and 1 new ones"):
            generate(model, ids[:, 6:], cache, attention_mask=mask)
        with pytest.raises(InvalidValueError, match="the cache holds 6 tokens, but the prompt has 1"):
            generate(model, ids[:, 6:], cache)
        assert cache.get_seq_length() == 6


@since_5_24  # 5.21 fails by itself, in the middle
def test_a11_chunks_of_a_prompt_that_is_already_cached_are_refused(models):
    for model in models.values():
        cache = cache_for(model)
        ids = ids_of(6)
        with torch.no_grad():
            model(ids, cache=cache)
        with pytest.raises(InvalidValueError, match="covers 0 tokens; expected 8: 6 in the cache and 2 new ones"):
            generate(model, ids, cache, prefill_chunk_size=2)


@every_family
def test_a_cache_together_with_use_cache_false_is_refused(models, family):
    """transformers would run the whole text again at every step, on top of what is cached."""
    model = models[family]
    cache = cache_for(model)
    with pytest.raises(InvalidValueError, match="use_cache is False, so that generate would run the whole text again"):
        generate(model, ids_of(5), cache, use_cache=False)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}])
def test_beams_on_a_cache_of_one_row_are_refused(models, options):
    for model in models.values():
        cache = cache_for(model)
        with torch.no_grad():
            model(ids_of(5), cache=cache)
        with pytest.raises(InvalidValueError, match=r"the cache holds 1 sequences, the input has 3; .*batch_repeat"):
            generate(model, ids_of(7), cache, **options)
        assert {layer.get_seq_length() for layer in cache.layers} == {5}


@every_family
@pytest.mark.parametrize("cached", [0, 4])
def test_k1_an_empty_prompt_is_refused_and_changes_nothing(models, family, cached):
    """K1: ids or embeddings of length 0, in a forward and through generate, on a new cache and on a used one."""
    model, ids = models[family], ids_of(7)
    cache = cache_for(model)
    embeds = model.get_input_embeddings()(ids[:, :0]).detach()
    with torch.no_grad():
        if cached:
            model(ids[:, :cached], cache=cache)
        for empty in ({"input_ids": ids[:, :0]}, {"inputs_embeds": embeds}):
            with pytest.raises(InvalidValueError, match="no tokens"):
                model(**empty, cache=cache)
        with pytest.raises(InvalidValueError, match="the prompt has 0" if cached else "no tokens"):
            generate(model, ids[:, :0], cache)
        assert cache.get_seq_length() == cached
    assert torch.equal(generate(model, ids, cache), generate(model, ids, "no"))
