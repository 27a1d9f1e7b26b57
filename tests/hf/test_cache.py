"""Making a `cache_for` a model, and the cache object: how it is copied, saved, shown and refused."""

import copy
import pickle

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, LlamaModel, Qwen3NextConfig
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, STATIC_LAYER_TYPE_MAPPING

from kvcache import InvalidTypeError, InvalidValueError
from kvcache.hf import cache_for
from tests.hf.runs import ids_of
from tests.hf.tagged import fill, lengths, positions_of
from tests.hf.tiny_models import CHANGING_POSITIONS, WINDOW, bart, gemma3, llama, t5

pytestmark = pytest.mark.usefixtures("one_thread")


def test_each_layer_gets_the_cache_of_its_kind(hybrid):
    cache = cache_for(hybrid)
    assert cache.is_sliding == [True, True, False]
    assert len(cache) == 3
    assert cache.is_croppable
    assert not cache.is_compileable
    assert not cache.is_initialized
    assert cache.get_seq_length() == 0
    assert cache.batch_size == -1
    assert cache.nbytes == 0


def test_c18_config_and_globals_are_unchanged_and_layer_counts_are_right():
    """C18: one dict for two models of 2 and 4 layers stays as it was; each cache has its own model's layers."""
    options = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    before = dict(options)
    mappings = dict(DYNAMIC_LAYER_TYPE_MAPPING), dict(STATIC_LAYER_TYPE_MAPPING)
    for layers in (2, 4):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **options))
        config = model.config.to_dict()
        cache = cache_for(model, max_tokens=8)
        model(torch.tensor([[1, 2, 3]]), cache=cache)
        assert lengths(cache) == [3] * layers
        assert model.config.to_dict() == config
    assert options == before
    assert mappings == (DYNAMIC_LAYER_TYPE_MAPPING, STATIC_LAYER_TYPE_MAPPING)


@pytest.mark.parametrize("model", ["llama", None, torch.nn.Linear(2, 2)], ids=["str", "None", "Linear"])
def test_what_is_no_transformers_model_is_refused(model):
    with pytest.raises(InvalidTypeError, match=f"model is a {type(model).__name__}; expected a transformers model"):
        cache_for(model)


def test_a_model_without_generate_is_refused():
    config = LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    with pytest.raises(
        InvalidTypeError, match="model is a LlamaModel; expected a transformers model that can generate"
    ):
        cache_for(LlamaModel(config))


def test_unsupported_layer_kinds_are_refused_by_number_and_name():
    model = llama()
    model.config = Qwen3NextConfig(num_hidden_layers=4)
    before = set(model.__dict__)
    message = (
        "layer 0 of the model is of kind 'linear_attention'; expected full_attention or sliding_attention in every"
    )
    with pytest.raises(InvalidValueError, match=message):
        cache_for(model)
    model.config = LlamaConfig(num_hidden_layers=2)
    model.config.layer_types = ["full_attention", "chunked_attention"]
    model.config.attention_chunk_size = 4
    with pytest.raises(InvalidValueError, match="layer 1 of the model is of kind 'chunked_attention'"):
        cache_for(model)
    assert set(model.__dict__) == before


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_tokens": 0}, InvalidValueError, "max_tokens is 0; expected an integer >= 1"),
        ({"max_tokens": 2.5}, InvalidTypeError, r"max_tokens is a float \(2.5\); expected an integer >= 1"),
        ({"storage": "int3"}, InvalidValueError, "storage is 'int3'; expected one of float16"),
        ({"storage": torch.int16}, InvalidValueError, "storage is torch.int16; expected one of float16"),
    ],
)
def test_bad_options_are_refused(hybrid, options, error, message):
    with pytest.raises(error, match=message):
        cache_for(hybrid, **options)


@pytest.mark.parametrize(("rope", "trained"), CHANGING_POSITIONS.values(), ids=CHANGING_POSITIONS)
def test_a7_positions_that_change_with_the_length_are_announced(rope, trained, recwarn):
    """A7: rotary bases that change with the length give other results past the trained one, and the cache says so."""
    model = llama(rope_parameters={"rope_theta": 10000.0, **rope}, max_position_embeddings=16)
    with pytest.warns(UserWarning, match=f"change beyond {trained} tokens, but keys cached earlier keep the old ones"):
        cache_for(model)
    with pytest.warns(UserWarning, match=rf"cache_for\(model, max_tokens={trained}\) stops before"):
        cache_for(model, max_tokens=trained + 1)
    recwarn.clear()
    cache_for(model, max_tokens=trained)
    cache_for(llama())
    cache_for(gemma3())
    assert not recwarn.list


def test_keys_and_values_are_the_valid_rows_and_read_only(hybrid):
    cache = cache_for(hybrid, max_tokens=16)
    assert cache.layers[0].keys is None
    assert cache.layers[2].values is None
    fill(cache, 7)
    assert positions_of(cache.layers[0].keys) == [2, 3, 4, 5, 6]
    assert positions_of(cache.layers[2].keys) == [0, 1, 2, 3, 4, 5, 6]
    assert positions_of(-cache.layers[2].values) == [0, 1, 2, 3, 4, 5, 6]
    assert cache.layers[2].keys.data_ptr() == cache.layers[2].rows.k_cache.data_ptr()
    with pytest.raises(AttributeError):
        cache.layers[2].keys = torch.zeros(1)
    cache.crop(-9)
    assert cache.layers[2].keys is None


def test_bytes_of_a_token_and_of_what_is_stored(hybrid):
    cache = cache_for(hybrid, max_tokens=16, storage="float32")
    assert (cache.nbytes, cache.stored_nbytes, cache.token_nbytes) == (0, 0, 0)
    fill(cache, 7)
    row = 2 * 2 * (4 + 3) * 4
    assert cache.token_nbytes == 3 * row
    assert cache.stored_nbytes == (WINDOW + WINDOW + 7) * row
    assert cache.nbytes == (WINDOW + WINDOW + 16) * row


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
@pytest.mark.parametrize("max_tokens", [None, 20], ids=["growing", "preallocated"])
def test_copies_share_no_buffers(hybrid, duplicate, max_tokens):
    cache = cache_for(hybrid, max_tokens)
    cache.activate_past_recording()
    fill(cache, 8)
    twin = duplicate(cache)
    for mine, other in zip(cache.layers, twin.layers, strict=True):
        assert torch.equal(mine.keys, other.keys)
        assert torch.equal(mine.values, other.values)
        for name in ("k_cache", "v_cache"):
            assert getattr(mine.rows, name).data_ptr() != getattr(other.rows, name).data_ptr()
    cache.crop(-3)
    fill(cache, 1)
    assert lengths(twin) == [8] * 3
    assert positions_of(twin.layers[0].keys)[-5:] == [3, 4, 5, 6, 7]
    twin.crop(-5)  # the copy records too
    assert lengths(twin) == [3] * 3
    assert twin.layers[2].max_tokens == max_tokens


def test_a_copied_encoder_decoder_cache_is_independent():
    model = t5()
    cache = cache_for(model)
    with torch.no_grad():
        model(input_ids=ids_of(5), decoder_input_ids=ids_of(3), cache=cache)
    for twin in (copy.copy(cache), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert twin.is_updated == {0: True, 1: True}
        twin.crop(-2)
        assert (cache.get_seq_length(), twin.get_seq_length()) == (3, 1)
        assert (
            twin.cross_attention_cache.layers[0].keys.data_ptr()
            != cache.cross_attention_cache.layers[0].keys.data_ptr()
        )


def test_a_cache_made_in_inference_mode_works_outside(models):
    for model in models.values():
        ids = ids_of(12)
        with torch.inference_mode():
            cache = cache_for(model)
            model(ids[:, :7], cache=cache)
            cache.crop(-1)
        twin = pickle.loads(pickle.dumps(copy.deepcopy(cache))).attach(model)
        expected = model(ids, use_cache=False).logits[:, 6:]
        for each in (cache, twin):
            logits = model(ids[:, 6:], cache=each).logits
            torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
            each.reorder_cache(torch.tensor([0]))
            each.batch_repeat_interleave(2)
            each.reset()


def test_gradients_flow_through_the_step_but_not_through_the_past(models):
    """Gradients of a step are those of a run whose earlier keys and values are constants; copying afterwards works."""
    for model in models.values():
        ids = ids_of(9)
        grads = []
        for cache in (cache_for(model), DynamicCache(config=model.config)):
            model.zero_grad()
            with torch.no_grad():
                model(ids[:, :6], cache=cache)
            model(ids[:, 6:], cache=cache).logits.sum().backward()
            grads.append([p.grad.clone() for p in model.parameters()])
            if not isinstance(cache, DynamicCache):
                assert copy.deepcopy(cache).get_seq_length() == 9
        for mine, other in zip(*grads, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)
        model.zero_grad()


def test_repr_says_what_matters_in_one_line(hybrid):
    cache = cache_for(hybrid, max_tokens=40)
    fill(cache, 7)
    assert repr(cache) == (
        f"ModelCache(2 sliding (window 5) + 1 full layers, max_tokens=40, batch_size=2, seq_len=7, "
        f"nbytes={2 * 2 * 7 * 50 * 8})"
    )
    assert repr(cache_for(llama(num_hidden_layers=30))) == (
        "ModelCache(30 full layers, max_tokens=None, batch_size=-1, seq_len=0, nbytes=0)"
    )
    assert repr(cache_for(bart())).startswith("EncoderDecoderModelCache(self_attention_cache=ModelCache(3 full layers")
