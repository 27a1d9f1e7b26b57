"""What would silently give wrong text, and is caught."""

import copy
import gc
import inspect
import pickle
import weakref

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM

from kvcache import InvalidTypeError, InvalidValueError
from kvcache.hf import cache_for
from tests.hf.runs import every_family, ids_of
from tests.hf.tagged import lengths
from tests.hf.tiny_models import FAMILIES, bart, gemma3, gpt2, llama, t5

pytestmark = pytest.mark.usefixtures("one_thread")


def attributes(model):
    return dict(model.__dict__), list(model._forward_pre_hooks), list(model._forward_pre_hooks_with_kwargs)


@pytest.mark.parametrize("make", [gemma3, gpt2, t5])
def test_the_model_is_left_as_it_was_when_its_last_cache_is_gone(make):
    model = make()
    before = attributes(model)
    first, second = cache_for(model), cache_for(model)
    twin = copy.deepcopy(first)
    assert len(model._forward_pre_hooks) == 1
    del first, second
    gc.collect()
    assert "prepare_inputs_for_generation" in model.__dict__
    again = cache_for(model)
    assert len(model._forward_pre_hooks) == 1
    del twin, again
    gc.collect()
    after = attributes(model)
    assert after == before
    assert all(after[0][name] is value for name, value in before[0].items())


def test_a_used_cache_lets_go_of_the_model_too():
    model = llama()
    before = attributes(model)
    model.generate(ids_of(4), max_new_tokens=3, cache=cache_for(model))
    gc.collect()
    assert attributes(model) == before


def test_a_cache_does_not_keep_its_model_alive():
    model = llama()
    cache = cache_for(model)
    alive = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert alive() is None
    finally:
        gc.enable()
    del cache


def test_an_instance_that_had_its_own_method_gets_it_back():
    """As PEFT does: an attribute of that name on the instance is called while guarded, and restored."""
    model = llama()
    calls = []

    def own(input_ids, **kwargs):
        calls.append(kwargs["next_sequence_length"])
        return LlamaForCausalLM.prepare_inputs_for_generation(model, input_ids, **kwargs)

    model.prepare_inputs_for_generation = own
    cache = cache_for(model)
    model.generate(ids_of(5), max_new_tokens=2, cache=cache)
    assert calls == [5, 1]
    del cache
    gc.collect()
    assert model.__dict__["prepare_inputs_for_generation"] is own


def test_what_was_put_over_the_guard_stays():
    model = llama()
    cache = cache_for(model)
    guarded = model.prepare_inputs_for_generation

    def over(*args, **kwargs):
        return guarded(*args, **kwargs)

    model.prepare_inputs_for_generation = over
    del cache
    gc.collect()
    assert model.__dict__["prepare_inputs_for_generation"] is over
    assert model.generate(ids_of(5), max_new_tokens=2).shape == (1, 7)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copied_or_saved_model_is_a_model_of_its_own(duplicate):
    model = llama()
    cache = cache_for(model)
    twin = duplicate(model)
    assert twin.prepare_inputs_for_generation.__self__ is twin
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    ids = ids_of(5)
    assert twin.generate(ids, max_new_tokens=3, cache=cache_for(twin)).tolist() == [[*ids[0].tolist(), 0, 0, 0]]
    assert torch.equal(model.generate(ids, max_new_tokens=3, cache=cache), llama().generate(ids, max_new_tokens=3))


def test_generate_still_knows_which_arguments_the_model_takes():
    model = llama()
    signature = inspect.signature(model.prepare_inputs_for_generation)
    cache = cache_for(model)
    assert inspect.signature(model.prepare_inputs_for_generation) == signature
    with pytest.raises(ValueError, match="typo"):
        model.generate(ids_of(5), max_new_tokens=2, cache=cache, typo=1)


@every_family
@pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")
def test_a11_a_mask_of_the_wrong_length_is_refused(models, family):
    """A11: cache of 6, one new id and a mask of 6 is an error that names all three; a mask of 7 is right."""
    model, ids = models[family], ids_of(7)
    with torch.no_grad():
        for argument in ("cache", "past_key_values"):
            cache = cache_for(model)
            model(ids[:, :6], cache=cache)
            message = "attention_mask covers 6 tokens; expected 7: 6 in the cache and 1 new ones"
            for mask in (torch.ones(1, 6), torch.tensor([[0, 1, 1, 1, 1, 1]])):
                with pytest.raises(InvalidValueError, match=message):
                    model(ids[:, 6:], attention_mask=mask, **{argument: cache})
            with pytest.raises(InvalidValueError, match=message):
                model(ids[:, 6:], mask, cache=cache) if family != "gpt2" else model(ids[:, 6:], cache, mask)
            assert lengths(cache) == [6] * len(cache)
            logits = model(ids[:, 6:], attention_mask=torch.ones(1, 7), **{argument: cache}).logits
            torch.testing.assert_close(logits, model(ids, use_cache=False).logits[:, 6:], rtol=1e-12, atol=1e-12)


def test_a11_embeddings_are_counted_as_ids_are(hybrid):
    cache = cache_for(hybrid)
    embeds = hybrid.get_input_embeddings()(ids_of(6)).detach()
    with torch.no_grad():
        hybrid(inputs_embeds=embeds, attention_mask=torch.ones(1, 6), cache=cache)
        with pytest.raises(InvalidValueError, match="covers 6 tokens; expected 12: 6 in the cache and 6 new ones"):
            hybrid(inputs_embeds=embeds, attention_mask=torch.ones(1, 6), cache=cache)


def test_a11_in_an_encoder_decoder_it_is_the_decoders_mask():
    model = bart()
    cache = cache_for(model)
    with torch.no_grad():
        model(input_ids=ids_of(5), attention_mask=torch.ones(1, 5), decoder_input_ids=ids_of(3), cache=cache)
        with pytest.raises(InvalidValueError, match="decoder_attention_mask covers 3 tokens; expected 4"):
            model(
                input_ids=ids_of(5),
                attention_mask=torch.ones(1, 5),
                decoder_input_ids=ids_of(1),
                decoder_attention_mask=torch.ones(1, 3),
                cache=cache,
            )


def test_other_caches_are_none_of_the_guards_business(hybrid):
    cache, other = cache_for(hybrid), DynamicCache(config=hybrid.config)
    ids = ids_of(5)
    with torch.no_grad():
        hybrid(ids, cache=other)
        hybrid(ids[:, :1], attention_mask=torch.ones(1, 6), cache=other)
        hybrid(ids, attention_mask=torch.ones(1, 5), use_cache=False)
    assert other.get_seq_length() == 6
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("make", [llama, gemma3, t5])
def test_a_cache_of_another_model_is_refused_and_unchanged(make):
    model, other = make(), make(seed=3)
    cache, guarding = cache_for(model), cache_for(other)
    ids, encoder = ids_of(5), {}
    prefix = "decoder_" if model.config.is_encoder_decoder else ""
    if prefix:
        encoder = {"encoder_outputs": model.get_encoder()(ids_of(4))}
    with torch.no_grad():
        model(**{f"{prefix}input_ids": ids[:, :3]}, cache=cache, **encoder)
        before = copy.deepcopy(cache)
        for argument in ("cache", "past_key_values"):
            with pytest.raises(InvalidValueError, match="made for another model"):
                other(**{f"{prefix}input_ids": ids[:, 3:]}, **encoder, **{argument: cache})
        for count in (3, 5):  # of which 3 are cached
            if not prefix:
                with pytest.raises(InvalidValueError, match="made for another model"):
                    other.generate(ids[:, :count], max_new_tokens=2, cache=cache)
        own, own_before = (getattr(each, "self_attention_cache", each) for each in (cache, before))
        assert torch.equal(own.known_tokens(), ids[:, :3])
        for layer, old in zip(own.layers, own_before.layers, strict=True):
            assert torch.equal(layer.keys, old.keys)
            assert torch.equal(layer.values, old.values)
        logits = model(**{f"{prefix}input_ids": ids[:, 3:]}, cache=cache, **encoder).logits
        expected = model(**{f"{prefix}input_ids": ids}, use_cache=False, **encoder).logits[:, 3:]
        torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    assert guarding.get_seq_length() == 0


@every_family
@pytest.mark.parametrize("guarded", [True, False], ids=["model guarded", "model not guarded"])
def test_a_loaded_cache_is_refused_until_it_is_attached(family, guarded):
    model, ids = FAMILIES[family](), ids_of(8)
    cache = cache_for(model)
    with torch.no_grad():
        model(ids[:, :6], cache=cache)
    saved = pickle.dumps(cache)
    if not guarded:
        del cache
        gc.collect()
        assert "prepare_inputs_for_generation" not in model.__dict__
    loaded = pickle.loads(saved)
    with torch.no_grad():
        with pytest.raises(InvalidValueError, match="attach"):
            model(ids[:, 6:], cache=loaded)
        for count in (6, 8):  # of which 6 are cached
            with pytest.raises(InvalidValueError, match="attach"):
                model.generate(ids[:, :count], max_new_tokens=2, cache=loaded)
        assert lengths(loaded) == [6] * len(loaded)
        assert torch.equal(loaded.known_tokens(), ids[:, :6])
        assert loaded.attach(model) is loaded
        with pytest.raises(InvalidValueError, match="covers 6 tokens; expected 8"):
            model(ids[:, 6:], attention_mask=torch.ones(1, 6), cache=loaded)
        twin = copy.deepcopy(loaded)
        logits = model(ids[:, 6:], cache=loaded).logits
        torch.testing.assert_close(logits, model(ids, use_cache=False).logits[:, 6:], rtol=1e-12, atol=1e-12)
        text = model.generate(ids, max_new_tokens=3, cache=twin)
        assert torch.equal(text, model.generate(ids, max_new_tokens=3, use_cache=False))
    del loaded, twin
    if not guarded:
        gc.collect()
        assert "prepare_inputs_for_generation" not in model.__dict__


def test_a_loaded_encoder_decoder_cache_is_attached_whole():
    model, ids, encoder_ids = bart(), ids_of(5), ids_of(4)
    cache = cache_for(model)
    with torch.no_grad():
        model(input_ids=encoder_ids, decoder_input_ids=ids[:, :3], cache=cache)
        loaded = pickle.loads(pickle.dumps(cache))
        with pytest.raises(InvalidValueError, match="attach"):
            model(input_ids=encoder_ids, decoder_input_ids=ids[:, 3:], cache=loaded)
        assert loaded.attach(model) is loaded
        logits = model(input_ids=encoder_ids, decoder_input_ids=ids[:, 3:], cache=loaded).logits
        expected = model(input_ids=encoder_ids, decoder_input_ids=ids, use_cache=False).logits[:, 3:]
        torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)


def test_a_cache_is_attached_only_to_a_model_with_such_layers():
    loaded = pickle.loads(pickle.dumps(cache_for(gemma3())))
    for model in (llama(num_hidden_layers=3), gemma3(window=6), gemma3(layer_types=["sliding_attention"] * 3)):
        before = attributes(model)
        with pytest.raises(InvalidValueError, match=r"the cache has layers of the kinds \['sliding \(window 5\)', .*"):
            loaded.attach(model)
        assert attributes(model) == before
    with pytest.raises(InvalidTypeError, match="model is a NoneType; expected a transformers model"):
        loaded.attach(None)
    model = gemma3(seed=4)
    loaded.attach(model)
    other, guarding = gemma3(), None
    guarding = cache_for(other)
    with pytest.raises(InvalidValueError, match="made for another model"):
        other(ids_of(2), cache=loaded)
    assert guarding.get_seq_length() == 0
    assert model(ids_of(2), cache=loaded).logits.shape[1] == 2


def test_known_tokens_follow_every_operation(models):
    model = models["llama"]
    ids = ids_of(6, batch=2)
    cache = cache_for(model)
    assert cache.known_tokens() is None
    with torch.no_grad():
        model(ids[:, :4], cache=cache)
        model(ids[:, 4:], cache=cache)
        assert torch.equal(cache.known_tokens(), ids)
        cache.crop(-3)
        model(ids[:, 5:], cache=cache)
        assert torch.equal(cache.known_tokens(), ids[:, [0, 1, 2, 5]])
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([3, 0, 1, 2]))
        cache.batch_select_indices(torch.tensor([0, 1]))
        assert torch.equal(copy.deepcopy(cache).known_tokens(), ids[[1, 0]][:, [0, 1, 2, 5]])
        model(inputs_embeds=model.get_input_embeddings()(ids), cache=cache)
        model(ids, cache=cache)
        assert cache.known_tokens() is None
        cache.reset()
        model.model(ids, cache=cache)  # the guard watches the whole model only
        assert cache.known_tokens() is None
