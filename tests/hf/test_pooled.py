"""`forward_step`: each sequence of a ragged step gets the logits that it gets alone, without a cache; or an error."""

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from kvcache import BlockPool, CacheSpec, InvalidTypeError, InvalidValueError, LayerSpec, NotSupportedError
from kvcache.hf import forward_step, use_attention
from kvcache.hf.versions import CACHE_ARGUMENT
from tests.hf.runs import ids_of
from tests.hf.tiny_models import (
    ALL_FAMILIES,
    CHANGING_POSITIONS,
    POOLED,
    bloom,
    deepseek_v3,
    gemma3,
    gpt2,
    llama,
    mistral,
    t5,
)

pytestmark = pytest.mark.usefixtures("one_thread", "softmax_in_float64")

A, B, C = (ids_of(count, seed=count)[0].tolist() for count in (23, 31, 18))  # windows are 5 and 6
# How many tokens each of the three gets in each step: prompts whole and in chunks, beside single tokens.
RAGGED = ((5, 11, 1), (1, 9, 7), (1, 1, 1), (4, 1, 2), (1, 8, 1), (9, 1, 1), (2, 0, 5))


def pool_of(model, storage="float64"):
    return BlockPool(CacheSpec.from_config(model.config), num_blocks=40, block_size=4, storage=storage)


@torch.no_grad()
def advance(model, pool, sequences, tokens):
    with pool.step(sequences, tokens) as step:
        return forward_step(model, step)


@torch.no_grad()
def alone(model, tokens):
    return model(torch.tensor([tokens]), use_cache=False).logits[0, -1]


def assert_as_alone(logits, model, sequences):
    expected = torch.stack([alone(model, sequence.tokens) for sequence in sequences])
    assert logits.shape == expected.shape
    assert (logits - expected).abs().max() <= 1e-12 * expected.abs().max()


def run_ragged(model, pool, assert_right):
    """Step the three texts as `RAGGED` says, and check the logits of each step."""
    texts = dict(zip([pool.new_sequence() for _ in range(3)], (A, B, C), strict=True))
    for counts in RAGGED:
        going = [(text, n) for text, n in zip(texts, counts, strict=True) if n]
        new = [texts[text][text.seq_len : text.seq_len + n] for text, n in going]
        sequences = [text for text, _ in going]
        assert_right(advance(model, pool, sequences, new), model, sequences)
    assert [text.tokens for text in texts] == [A, B, C]
    pool.check()


@pytest.mark.parametrize("family", POOLED)
def test_each_sequence_of_a_ragged_step_gets_the_logits_that_it_gets_alone(family):
    model = ALL_FAMILIES[family]()
    before = model.config._attn_implementation
    run_ragged(model, pool_of(model), assert_as_alone)
    assert model.config._attn_implementation == before


def test_scores_are_scaled_as_the_model_says():
    model = gemma3(query_pre_attn_scalar=3)
    run_ragged(model, pool_of(model), assert_as_alone)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_rows_in_int8_give_logits_nearby(family):
    model = ALL_FAMILIES[family]()
    errors = []

    def note_error(logits, model, sequences):
        expected = torch.stack([alone(model, sequence.tokens) for sequence in sequences])
        errors.append(float((logits - expected).abs().max() / expected.abs().max()))

    run_ragged(model, pool_of(model, storage="int8"), note_error)
    assert 1e-6 < max(errors) < 0.1


def test_forks_go_on_from_a_common_past():
    model = gemma3()
    pool = pool_of(model)
    text = pool.new_sequence()
    advance(model, pool, [text], [A[:10]])
    branches = [text.fork(), text.fork()]
    for tokens in ([[3], [4, 5, 6], [7]], [[8, 9], [10], [11]]):
        sequences = [text, *branches]
        assert_as_alone(advance(model, pool, sequences, tokens), model, sequences)
    assert branches[0].tokens == [*A[:10], 4, 5, 6, 10]


def test_it_works_where_the_attention_is_exchanged_already():
    model = llama()
    pool = pool_of(model)
    text = pool.new_sequence()
    with use_attention(model):
        assert_as_alone(advance(model, pool, [text], [A]), model, [text])
        assert model.config._attn_implementation == "kvcache"


def test_a_model_that_gives_the_logits_of_all_tokens_is_asked_for_the_last():
    class OfAllTokens(LlamaForCausalLM):
        def forward(self, input_ids, attention_mask, position_ids, use_cache, return_dict, **cache):
            return super().forward(input_ids, attention_mask, position_ids, use_cache=use_cache, **cache)

    model = llama()
    model.__class__ = OfAllTokens
    pool = pool_of(model)
    texts = [pool.new_sequence(), pool.new_sequence()]
    logits = advance(model, pool, texts, [A[:7], B[:3]])
    model.__class__ = LlamaForCausalLM
    assert_as_alone(logits, model, texts)


def test_only_the_last_tokens_get_logits():
    model = llama()
    rows = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: rows.append(inputs[0].shape[1]))
    pool = pool_of(model)
    advance(model, pool, [pool.new_sequence(), pool.new_sequence()], [A, B])
    assert rows == [2]


def test_a_gradient_flows_to_what_comes_after_the_keys_and_values():
    model = llama()
    pool = pool_of(model)
    with pool.step([pool.new_sequence()], [A[:6]]) as step:
        forward_step(model, step).sum().backward()
    attention = model.model.layers[-1].self_attn
    assert attention.q_proj.weight.grad.abs().max() > 0
    assert attention.k_proj.weight.grad is None


def test_a_forward_that_fails_in_the_middle_leaves_all_as_it_was():
    model = gemma3()
    pool = pool_of(model)
    texts = [pool.new_sequence(), pool.new_sequence()]
    advance(model, pool, texts, [A[:9], B[:6]])
    before = [(text.tokens, text.blocks("full"), text.blocks("sliding")) for text in texts], pool.num_free

    def fail(*_):
        raise KeyError("interrupted")

    hook = model.model.layers[1].register_forward_hook(fail)
    with pytest.raises(KeyError, match="interrupted"):
        advance(model, pool, texts, [A[9:12], B[6:7]])
    hook.remove()
    assert before == ([(text.tokens, text.blocks("full"), text.blocks("sliding")) for text in texts], pool.num_free)
    assert model.config._attn_implementation == "sdpa"
    assert_as_alone(advance(model, pool, texts, [A[9:12], B[6:7]]), model, texts)


# Models that a step cannot serve, and what is refused before the model runs.


def refusal(model, pool=None, tokens=A[:6]):
    """Return the error of a step, which leaves the pool empty."""
    pool = pool_of(model) if pool is None else pool
    with pytest.raises((InvalidTypeError, InvalidValueError, NotSupportedError)) as caught:
        advance(model, pool, [pool.new_sequence()], [tokens])
    assert pool.num_free == pool.num_blocks
    return type(caught.value), str(caught.value)


class Touching(LlamaAttention):
    """Attention that does something with the keys that its cache returns."""

    def forward(self, *args, **kwargs):
        cache = kwargs[CACHE_ARGUMENT]
        update = cache.update

        def touched(*rows, **options):
            keys, values = update(*rows, **options)
            return self.change(keys, values)

        cache.update = touched
        try:
            return super().forward(*args, **kwargs)
        finally:
            cache.update = update


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda self, keys, values: (keys * 2, values), "layer 1 does something with its keys and values between"),
        (lambda self, keys, values: (keys, values + 0), "layer 1 does something with its keys and values between"),
        (lambda self, keys, values: (values, keys), "layer 1 attends with keys and values other than its own;"),
        (lambda self, keys, values: (keys, keys), "layer 1 attends with keys and values other than its own;"),
        (lambda self, keys, values: (values, values), "layer 1 attends with keys and values other than its own;"),
        (lambda self, keys, values: (torch.ones(keys.shape).double(), values), "layer 1 does something with its keys"),
    ],
    ids=["keys", "values", "exchanged", "keys twice", "values twice", "others"],
)
def test_a_model_that_changes_keys_and_values_is_refused(change, problem):
    model = llama()
    model.model.layers[1].self_attn.__class__ = type("Changing", (Touching,), {"change": change})
    error, message = refusal(model)
    assert error is NotSupportedError
    assert problem in message
    assert message.endswith("use cache_for(model), which serves such models too")


@pytest.mark.parametrize(
    ("name", "option", "problem"),
    [
        ("attention_mask", None, "layer 0 attends with a mask of its own;"),
        ("attention_mask", torch.ones(1, 1, 6, 6, dtype=torch.bool).tril(), "layer 0 attends with a mask of its own;"),
        ("position_bias", torch.zeros(1, 4, 6, 6), "layer 0 attends with position_bias;"),
        ("is_causal", False, "layer 0 attends with is_causal=False;"),
    ],
    ids=["no mask", "mask", "position_bias", "is_causal"],
)
def test_attention_that_a_step_cannot_serve_is_refused(name, option, problem):
    model = llama()
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: (args, kwargs | {name: option}), with_kwargs=True
    )
    error, message = refusal(model)
    assert error is NotSupportedError
    assert problem in message


def test_dropout_is_refused():
    error, message = refusal(llama(attention_dropout=0.5).train())
    assert error is NotSupportedError
    assert "layer 0 attends with dropout;" in message


@pytest.mark.parametrize(("layer", "own"), [(0, 5), (2, None)])
def test_a_layer_that_attends_with_another_window_than_its_configuration_says_is_refused(layer, own):
    model = gemma3(window=5)
    model.model.layers[layer].self_attn.sliding_window = 4
    error, message = refusal(model)
    assert error is NotSupportedError
    assert f"layer {layer} attends with a window of 4 (the pool's layer has {own});" in message


def test_a_layer_that_leaves_its_window_to_its_mask_has_the_window_of_its_configuration():
    model = gemma3(window=5)
    model.model.layers[0].self_attn.sliding_window = None
    run_ragged(model, pool_of(model), assert_as_alone)


def test_a_model_that_looks_into_its_mask_or_asks_for_a_length_is_refused():
    looks = llama()
    looks.model.register_forward_pre_hook(
        lambda module, args, kwargs: kwargs["attention_mask"].sum() and None, with_kwargs=True
    )
    assert refusal(looks)[0] is NotSupportedError
    assert "it does something with its attention mask;" in refusal(looks)[1]
    asks = llama()
    asks.model.register_forward_pre_hook(
        lambda module, args, kwargs: kwargs[CACHE_ARGUMENT].get_seq_length() and None, with_kwargs=True
    )
    assert "it asks its cache for the length of the text;" in refusal(asks)[1]


def test_a_model_that_takes_no_positions_is_refused():
    class WithoutPositions(LlamaForCausalLM):
        def forward(self, input_ids, attention_mask=None, **options):
            return super().forward(input_ids, attention_mask, **options)

    model = llama()
    model.__class__ = WithoutPositions
    error, message = refusal(model)
    assert error is NotSupportedError
    assert message.startswith("WithoutPositions takes no position_ids")


def test_a_model_whose_tokens_see_later_ones_is_refused():
    model = llama()
    model.config.is_causal = False
    error, message = refusal(model)
    assert error is NotSupportedError
    assert "is configured with is_causal=False" in message


def test_layers_that_keep_something_else_are_refused():
    pool = pool_of(llama())
    error, message = refusal(deepseek_v3(), pool)
    assert error is InvalidValueError
    assert "layer 0 of the model has kv_lora_rank=10: layers keep one latent for all heads (MLA)" in message


@pytest.mark.parametrize(
    ("layers", "problem"),
    [
        ([LayerSpec(2, 8)], "the pool has 1 layers; expected the model's 2;"),
        ([LayerSpec(2, 8, window=6), LayerSpec(4, 8, window=6)], "layer 1 of the pool is LayerSpec(num_heads=4, "),
        ([LayerSpec(2, 8, window=6), LayerSpec(2, 4, window=6)], "layer 1 of the pool is LayerSpec(num_heads=2, head_"),
        ([LayerSpec(2, 8, 4, window=6)] * 2, "layer 0 of the pool is LayerSpec(num_heads=2, head_dim=8, v_head_dim=4"),
        ([LayerSpec(2, 8, window=5)] * 2, "expected the model's LayerSpec(num_heads=2, head_dim=8, v_head_dim=8, win"),
        ([LayerSpec(2, 8)] * 2, "window=None, sinks=0); expected the model's LayerSpec(num_heads=2"),
        ([LayerSpec(2, 8, window=6, sinks=1)] * 2, "window=6, sinks=1); expected the model's LayerSpec(num_heads=2"),
    ],
    ids=["number", "heads", "head size", "value size", "window", "no window", "sinks"],
)
def test_a_pool_for_other_layers_is_refused(layers, problem):
    error, message = refusal(mistral(), BlockPool(CacheSpec(layers), num_blocks=8, block_size=4))
    assert error is InvalidValueError
    assert problem in message
    assert message.endswith("make the pool with CacheSpec.from_config(model.config)")


def test_a_pool_that_fitted_one_model_is_refused_by_another():
    model = llama()
    pool = pool_of(model)
    advance(model, pool, [pool.new_sequence()], [A])
    pool.sequences[0].free()
    error, message = refusal(mistral(), pool)
    assert error is InvalidValueError
    assert "layer 0 of the pool" in message


def test_a_pool_on_another_device_is_refused():
    model = llama()
    pool = pool_of(model)
    error, message = refusal(model.to("meta"), pool)
    assert error is InvalidValueError
    assert message == "the pool is on cpu; expected it on the model's device, meta"


@pytest.mark.parametrize(("rope", "trained"), CHANGING_POSITIONS.values(), ids=CHANGING_POSITIONS)
def test_positions_that_would_change_for_the_others_are_refused(rope, trained):
    """One sequence beyond the trained length would give all of the step another rotary table."""
    model = llama(rope_parameters={"rope_theta": 10000.0, **rope}, max_position_embeddings=16)
    pool = pool_of(model)
    long, short = texts = [pool.new_sequence(), pool.new_sequence()]
    assert_as_alone(advance(model, pool, texts, [A[:trained], B[:3]]), model, texts)
    message = f"gets {trained + 1} tokens, .* type '{rope['rope_type']}' change beyond {trained}, for all sequences"
    with pytest.raises(InvalidValueError, match=message):
        advance(model, pool, texts, [A[trained : trained + 1], B[3:4]])
    assert (long.seq_len, short.seq_len) == (trained, 3)
    assert_as_alone(advance(model, pool, [short], [B[3:4]]), model, [short])


def test_models_that_use_attention_or_cache_for_refuse_are_refused():
    pool = pool_of(gpt2())
    assert refusal("smollm2", pool) == (
        InvalidTypeError,
        "model is a str; expected a transformers model that can generate, for instance from "
        "AutoModelForCausalLM.from_pretrained",
    )
    error, message = refusal(t5(), pool)
    assert error is InvalidTypeError
    assert "an encoder-decoder; expected a decoder only" in message
    error, message = refusal(bloom(), pool)
    assert error is InvalidValueError
    assert "BloomForCausalLM has attention of its own" in message


def test_what_is_no_open_step_is_refused():
    model = llama()
    pool = pool_of(model)
    with pytest.raises(InvalidTypeError, match=r"step is a list; expected a Step, which pool.step\(...\) returns"):
        forward_step(model, [[1, 2]])
    step = pool.step([pool.new_sequence()], [A])
    step.abort()
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model runs"))
    with pytest.raises(InvalidValueError, match=r"the step is over; start another with pool.step\(...\)"):
        forward_step(model, step)


def test_a_step_takes_one_forward():
    model = llama()
    pool = pool_of(model)
    with torch.no_grad(), pool.step([pool.new_sequence()], [A]) as step:
        logits = forward_step(model, step)
        with pytest.raises(InvalidValueError, match="layer 0 is appended already"):
            forward_step(model, step)
    assert_as_alone(logits, model, pool.sequences)


@pytest.mark.parametrize("make", [llama, gemma3, gpt2], ids=lambda make: make.__name__)
def test_logits_at_any_places_are_those_of_texts_that_end_there(make):
    model = make()
    pool = pool_of(model)
    texts = [pool.new_sequence(), pool.new_sequence()]
    advance(model, pool, texts, [A[:3], B[:4]])
    places = torch.tensor([4, 0, 2, 4])
    with torch.no_grad(), pool.step(texts, [A[3:6], B[4:6]]) as step:
        logits = forward_step(model, step, places)
    expected = torch.stack([alone(model, tokens) for tokens in (B[:6], A[:4], A[:6], B[:6])])
    assert (logits - expected).abs().max() <= 1e-12 * expected.abs().max()


def test_places_that_are_none_of_a_steps_are_refused_before_anything_is_stored():
    model = llama()
    pool = pool_of(model)
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model runs"))
    with pool.step([pool.new_sequence()], [A]) as step:
        for places in ([23], [-1], torch.tensor([[0]])):
            with pytest.raises(InvalidValueError, match=r"^places "):
                forward_step(model, step, places)
        for places in (torch.tensor([0.0]), torch.tensor([True]), "last"):
            with pytest.raises(InvalidTypeError, match=r"^places "):
                forward_step(model, step, places)
        step.abort()
