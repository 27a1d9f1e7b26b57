"""A forward that raised in the middle: what it left in some of the layers is taken back by the next one."""

import copy
import itertools
from contextlib import contextmanager

import pytest
import torch

from kvcache import InvalidValueError
from kvcache.hf import cache_for
from tests.hf.runs import assert_same_logits, every_family, generate, ids_of
from tests.hf.tagged import lengths
from tests.hf.tiny_models import bart

pytestmark = pytest.mark.usefixtures("one_thread")


def layers_of(model):
    return model.transformer.h if hasattr(model, "transformer") else model.get_decoder().layers


@contextmanager
def interrupted(layer, call=1):
    """Raise once, when this layer is called for the time `call`, and check that this ends what is inside."""
    calls = itertools.count(1)

    def interrupt(*_):
        if next(calls) == call:
            raise KeyboardInterrupt

    hook = layer.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        yield
    hook.remove()


@every_family
@pytest.mark.parametrize("cached", [0, 2])
@pytest.mark.parametrize("max_tokens", [None, 6], ids=["growing", "preallocated"])
def test_the_same_forward_again_gives_what_one_alone_would(models, family, cached, max_tokens):
    model, ids = models[family], ids_of(6)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        for layer in layers_of(model)[1:]:
            cache = cache_for(model, max_tokens)
            if cached:
                model(ids[:, :cached], cache=cache)
            with interrupted(layer):
                model(ids[:, cached:5], cache=cache)
            assert len(set(lengths(cache))) == 2
            for masked in (False, True):
                twin = copy.deepcopy(cache)
                parts = []
                for start, stop in ((cached, 5), (5, 6)):
                    mask = {"attention_mask": torch.ones(1, stop)} if masked else {}
                    parts.append(model(ids[:, start:stop], cache=twin, **mask).logits)
                assert_same_logits(torch.cat(parts, dim=1), expected[:, cached:])
                assert torch.equal(twin.known_tokens(), ids)


@every_family
def test_two_interruptions_in_a_row_are_taken_back(models, family):
    model, ids = models[family], ids_of(4)
    cache = cache_for(model)
    with torch.no_grad():
        for count in (3, 4):
            with interrupted(layers_of(model)[-1]):
                model(ids[:, :count], cache=cache)
        assert_same_logits(model(ids, cache=cache).logits, model(ids, use_cache=False).logits)
    assert torch.equal(cache.known_tokens(), ids)


@every_family
@pytest.mark.parametrize("where", ["inside the last layer", "after the last layer"])
def test_an_interruption_when_every_layer_has_stored_the_tokens_is_taken_back_too(models, family, where):
    model, ids = models[family], ids_of(4)
    cache = cache_for(model)
    with torch.no_grad():
        model(ids[:, :2], cache=cache)
        with interrupted(layers_of(model)[-1].mlp if where == "inside the last layer" else model.lm_head):
            model(ids[:, 2:], cache=cache)
        assert_same_logits(model(ids[:, 2:], cache=cache).logits, model(ids, use_cache=False).logits[:, 2:])
    assert cache.get_seq_length() == 4
    assert torch.equal(cache.known_tokens(), ids)


@pytest.mark.parametrize(("where", "stored"), [("before the last layer", [6, 6, 4]), ("after it", [6, 6, 6])])
def test_a_window_that_cannot_go_back_says_reset(hybrid, where, stored):
    cache, ids = cache_for(hybrid), ids_of(8)
    with torch.no_grad():
        hybrid(ids[:, :4], cache=cache)
        with interrupted(hybrid.model.layers[2] if where == "before the last layer" else hybrid.lm_head):
            hybrid(ids[:, 4:6], cache=cache)
        message = r"interrupted: layers hold between 4 and 6 tokens, .*; reset\(\) the cache"
        for _ in range(2):
            with pytest.raises(InvalidValueError, match=message):
                hybrid(ids[:, 4:6], cache=cache)
            with pytest.raises(InvalidValueError, match=message):
                generate(hybrid, ids, cache)
        assert lengths(cache) == stored
        cache.reset()
        assert_same_logits(hybrid(ids, cache=cache).logits, hybrid(ids, use_cache=False).logits)


def test_a_window_that_records_can_go_back(hybrid):
    cache, ids = cache_for(hybrid), ids_of(12)
    with torch.no_grad():
        hybrid(ids[:, :9], cache=cache)
        cache.activate_past_recording()
        with interrupted(hybrid.model.layers[1]):
            hybrid(ids[:, 9:], cache=cache)
        assert lengths(cache) == [12, 9, 9]
        assert_same_logits(hybrid(ids[:, 9:], cache=cache).logits, hybrid(ids, use_cache=False).logits[:, 9:])


@every_family
@pytest.mark.parametrize("step", [1, 3])
def test_generate_goes_on_where_it_was_interrupted(models, family, step):
    """With the same prompt if it was the prefill, else with the text that the cache knows."""
    model, ids = models[family], ids_of(2)
    cache, whole = cache_for(model), generate(model, ids, "no", max_new_tokens=9)
    with interrupted(layers_of(model)[1], call=step):
        generate(model, ids, cache, max_new_tokens=9)
    text = cache.known_tokens()
    assert torch.equal(text, whole[:, : 1 + step])
    assert torch.equal(generate(model, text, cache, max_new_tokens=10 - step), whole)


@every_family
def test_beams_go_on_with_the_same_prompt(models, family):
    model, ids = models[family], ids_of(3)
    cache = cache_for(model)
    with interrupted(layers_of(model)[1]):
        generate(model, ids, cache, num_beams=2)
    assert torch.equal(generate(model, ids, cache, num_beams=2), generate(model, ids, "no", num_beams=2))


def test_an_encoder_decoder_goes_on_with_the_same_input():
    model, encoder_ids, ids = bart(), ids_of(5, seed=3), ids_of(4)
    cache = cache_for(model)
    with torch.no_grad():
        expected = model(input_ids=encoder_ids, decoder_input_ids=ids, use_cache=False).logits
        for start, stop in ((0, 3), (3, 4)):
            arguments = {"input_ids": encoder_ids, "decoder_input_ids": ids[:, start:stop], "cache": cache}
            for layer in layers_of(model)[1:]:
                with interrupted(layer):
                    model(**arguments)
            assert_same_logits(model(**arguments).logits, expected[:, start:stop])
