"""`NativeDecoder`: what a model of transformers gives, or an error that says which part of the model is in the way."""

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

from kvcache import BlockPool, CacheSpec, InvalidTypeError, InvalidValueError, LayerSpec, NotSupportedError
from kvcache.decoder import ManyRows
from kvcache.hf.describe import FAMILIES
from kvcache.hf.native_decoder import LOOK_EVERY, NativeDecoder
from tests.hf.runs import decoded_model, ids_of
from tests.hf.tiny_models import CHANGING_POSITIONS, gemma, gemma2, gemma3, gpt2, llama, mistral, qwen2, qwen3
from tests.kernels import needs_kernels

pytestmark = [needs_kernels, pytest.mark.usefixtures("one_thread", "softmax_in_float64", "few_tokens_are_few")]

FLOAT32 = torch.float32
IDS = ids_of(40, seed=5)  # windows are 5 and 6
FEW = 24  # tokens of a step that go through the kernels, here
FEW_AT_ONCE = [5, 1, 1, 14, 8, 11]
SIZES = {"intermediate_size": 64}  # whole groups of 32, for int8


def rope(kind, **parameters):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 8.0, "original_max_position_embeddings": 32}
MODELS = {
    "Llama": (llama, {}),
    "Llama, biases": (llama, {"attention_bias": True, "mlp_bias": True}),
    "Llama, tied head": (llama, {"tie_word_embeddings": True}),
    "Llama, positions of llama3": (llama, rope("llama3", **LLAMA3)),
    "Llama, positions of yarn": (llama, rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "Llama, positions of linear": (llama, rope("linear", factor=2.0)),
    "Llama, odd sizes": (
        llama,
        {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 1, "intermediate_size": 51, "head_dim": 6},
    ),
    "Mistral": (mistral, {}),
    "Mistral, other heads": (mistral, {"head_dim": 20, "window": 3}),
    "Qwen2": (qwen2, {}),
    "Qwen2, no window": (qwen2, {"use_sliding_window": False}),
    "Qwen3": (qwen3, {}),
    "Qwen3, biases": (qwen3, {"attention_bias": True}),
    "Gemma": (gemma, {}),
    "Gemma, own head": (gemma, {"tie_word_embeddings": False}),
    "Gemma2": (gemma2, {"seed": 1}),
    "Gemma3": (gemma3, {}),
    "Gemma3, tied head": (gemma3, {"tie_word_embeddings": True, "query_pre_attn_scalar": 3, "initializer_range": 0.05}),
}


@pytest.fixture
def few_tokens_are_few(monkeypatch):
    """So that steps of a few dozen tokens go either way."""
    monkeypatch.setattr(ManyRows, "worth_it", FEW + 1)


every_model = pytest.mark.parametrize("name", MODELS)


def made(name, dtype=FLOAT32, **options):
    make, settings = MODELS[name]
    return make(dtype, **(settings | options))


def pool_of(model, storage="float32", block_size=4):
    return BlockPool(CacheSpec.from_config(model.config), num_blocks=80, block_size=block_size, storage=storage)


def advance(decoder, sequences, tokens, places=None):
    with sequences[0].pool.step(sequences, tokens) as step:
        return decoder.forward_step(step, places)


def in_chunks(decoder, pool, ids, sizes):
    """Return the logits of all of these tokens, run in steps of these sizes."""
    sequence, start, logits = pool.new_sequence(), 0, []
    for size in sizes:
        logits.append(advance(decoder, [sequence], [ids[start : start + size]], torch.arange(size)))
        start += size
    sequence.free()
    return torch.cat(logits)


def greedy(decoder, pool, prompt, chunks, count):
    sequence = pool.new_sequence()
    for part in prompt.split(chunks):
        logits = advance(decoder, [sequence], [part.tolist()])
    while sequence.seq_len < len(prompt) + count - 1:
        logits = advance(decoder, [sequence], [[int(logits.argmax())]])
    return [*sequence.tokens[len(prompt) :], int(logits.argmax())]


@torch.no_grad()
def uncached(model, ids):
    return model(torch.tensor([ids]), use_cache=False).logits[0]


def assert_near(logits, expected, tolerance=1e-5):
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().max() <= tolerance * expected.abs().max()


def assert_right(decoder, model):
    """Check a prompt in two steps, few tokens and many, against the model in float64."""
    pool = pool_of(model)
    ids = IDS[0].tolist()
    logits = in_chunks(decoder, pool, ids, (3, 36, 1))
    assert_near(logits, uncached(copy.deepcopy(model).double(), ids))
    pool.check()


# What comes out.


def test_all_families_are_here():
    assert {name.split(",")[0] for name in MODELS} == set(FAMILIES)


@every_model
def test_greedy_tokens_are_those_of_transformers(name):
    model = made(name)
    prompt = IDS[:, :33]
    expected = model.generate(prompt, max_new_tokens=40, do_sample=False)[0, 33:].tolist()
    assert len(set(expected)) > 3
    decoder, pool = NativeDecoder(model), pool_of(model)
    for chunks in ([33], [26, 7], [8, 1, 24], [1] * 33):
        assert greedy(decoder, pool, prompt[0], chunks, 40) == expected
    pool.check()


@every_model
def test_logits_are_those_of_float64_without_a_cache(name):
    ids = IDS[0].tolist()
    expected = uncached(made(name, torch.float64), ids)
    model = made(name)
    decoder = NativeDecoder(model)
    for sizes in ([40], [FEW, 40 - FEW], [5, 1, 26, 8], [1] * 40):
        assert_near(in_chunks(decoder, pool_of(model), ids, sizes), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_model
def test_half_precision_is_at_most_4_times_as_far_off_as_the_uncached_run(name, dtype):
    half = made(name, dtype, initializer_range=0.1)
    ids = IDS[0].tolist()
    expected = uncached(copy.deepcopy(half).double(), ids)
    error = (uncached(half, ids) - expected).abs().max()
    floor = 4 * torch.finfo(dtype).eps * expected.abs().max()
    decoder = NativeDecoder(half)
    for sizes in ([40], [5, 1, 26, 8], [1] * 40):
        logits = in_chunks(decoder, pool_of(half, storage=dtype), ids, sizes)
        assert (logits - expected).abs().max() <= max(4 * error, floor)


def test_smollm2_says_what_it_says_in_transformers(smollm2):
    model, tokenizer = smollm2
    prompt = tokenizer("A transformer needs a KV cache because", return_tensors="pt")["input_ids"]
    expected = model.generate(prompt, max_new_tokens=256, do_sample=False, eos_token_id=None)
    pool = BlockPool(CacheSpec.from_config(model.config), num_blocks=20, block_size=16)
    text = greedy(NativeDecoder(model), pool, prompt[0], [5, prompt.shape[1] - 5], 256)
    assert text == expected[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Gemma3"])
def test_sequences_of_a_ragged_step_and_forks_get_the_logits_that_they_get_alone(name):
    model, reference = made(name), made(name, torch.float64)
    decoder, pool = NativeDecoder(model), pool_of(model)
    texts = [IDS[0, start:].tolist() for start in (0, 9, 14)]
    sequences = [pool.new_sequence() for _ in texts]
    for counts in ((5, 11, 1), (1, 9, 16), (1, 1, 1), (4, 1, 3)):
        new = [
            text[sequence.seq_len : sequence.seq_len + count]
            for text, sequence, count in zip(texts, sequences, counts, strict=True)
        ]
        logits = advance(decoder, sequences, new)
        assert_near(logits, torch.stack([uncached(reference, sequence.tokens)[-1] for sequence in sequences]))
    branch = sequences[0].fork()
    logits = advance(decoder, [sequences[0], branch], [[3], [4, 5]])
    assert_near(logits[0], uncached(reference, sequences[0].tokens)[-1])
    assert_near(logits[1], uncached(reference, branch.tokens)[-1])
    pool.check()


@pytest.mark.parametrize("storage", ["float64", "bfloat16", "int8", "int4"])
def test_rows_may_be_kept_in_any_way(storage):
    model = made("Llama", initializer_range=0.1)
    ids = IDS[0].tolist()
    expected = uncached(copy.deepcopy(model).double(), ids)
    for sizes in ([40], [1] * 40):
        logits = in_chunks(NativeDecoder(model), pool_of(model, storage), ids, sizes)
        assert_near(logits, expected, {"float64": 1e-5, "bfloat16": 0.01, "int8": 0.02, "int4": 0.2}[storage])


@pytest.mark.parametrize(("settings", "trained"), CHANGING_POSITIONS.values(), ids=CHANGING_POSITIONS)
def test_positions_that_change_with_the_length_are_right_up_to_there(settings, trained):
    settings = {"rope_parameters": {"rope_theta": 10000.0, **settings}, "max_position_embeddings": 16}
    model, ids = llama(FLOAT32, **settings), IDS[0, :trained].tolist()
    decoder, pool = NativeDecoder(model), pool_of(model)
    expected = uncached(llama(**settings), ids)
    assert_near(in_chunks(decoder, pool, ids, [3, trained - 3]), expected)
    uncached(model, IDS[0].tolist())  # a longer text, which changes the model's own tables
    assert_near(in_chunks(decoder, pool, ids, [3, trained - 3]), expected)
    sequence = pool.new_sequence()
    with pytest.raises(InvalidValueError, match=f"gets {trained + 1} tokens, .* change beyond {trained}"):
        advance(decoder, [sequence], [IDS[0, : trained + 1].tolist()])
    assert sequence.seq_len == 0


def test_it_works_in_inference_mode_and_out_of_it():
    model = made("Gemma3")
    decoder, pool = NativeDecoder(model), pool_of(model)
    sequence = pool.new_sequence()
    ids = IDS[0].tolist()
    with torch.inference_mode():
        advance(decoder, [sequence], [ids[:3]])
        advance(decoder, [sequence], [ids[3:33]])
        inside = NativeDecoder(model)
    advance(decoder, [sequence], [ids[33:34]])
    assert_near(advance(inside, [sequence], [ids[34:]])[0], uncached(made("Gemma3", torch.float64), ids)[-1])


def test_a_model_of_inference_tensors():
    with torch.inference_mode():
        model = made("Llama", **SIZES)
    for weights in (None, "int8"):
        decoder = NativeDecoder(model, weights=weights)
        logits = in_chunks(decoder, pool_of(model), IDS[0].tolist(), [5, 35])
        assert_near(
            logits, uncached(made("Llama", torch.float64, **SIZES), IDS[0].tolist()), 1e-5 if not weights else 0.2
        )


def test_no_gradient_flows():
    model = made("Llama")
    pool = pool_of(model)
    assert not advance(NativeDecoder(model), [pool.new_sequence()], [[1, 2]]).requires_grad


def test_building_it_leaves_the_model_as_it_was():
    model = made("Gemma2")
    before, attention = copy.deepcopy(model.state_dict()), model.config._attn_implementation
    NativeDecoder(model)
    assert model.config._attn_implementation == attention
    assert all(torch.equal(weights, before[name]) for name, weights in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# int8 weights.


@pytest.mark.parametrize("dtype", [FLOAT32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["Llama", "Llama, biases", "Llama, tied head", "Gemma2", "Gemma3, tied head"])
def test_int8_runs_the_weights_that_its_codes_stand_for(name, dtype):
    model = made(name, dtype, **SIZES, initializer_range=0.1)
    ids = IDS[0].tolist()
    decoder, expected = NativeDecoder(model, weights="int8"), uncached(decoded_model(model), ids)
    embeddings_round = dtype == torch.bfloat16 and "Gemma" in name
    assert_near(in_chunks(decoder, pool_of(model), ids, FEW_AT_ONCE), expected, 0.02 if embeddings_round else 1e-5)
    assert_near(in_chunks(decoder, pool_of(model), ids, [26, 14]), expected, 0.05)  # products may be in bfloat16
    assert decoder.description.step_nbytes < 0.6 * NativeDecoder(model).description.step_nbytes


# Which models are refused, and why.


def refusal(model, error=NotSupportedError, **options):
    with pytest.raises(error) as caught:
        NativeDecoder(model, **options)
    return str(caught.value)


class Mine(LlamaForCausalLM):
    pass


class Adapted(nn.Module):
    """As LoRA wraps a matrix."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        return self.base(x)


class OtherLinear(nn.Linear):
    pass


def test_models_of_other_classes_are_refused():
    known = (
        "expected one of LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, GemmaForCausalLM, "
        "Gemma2ForCausalLM, Gemma3ForCausalLM"
    )
    assert refusal(gpt2(FLOAT32)) == f"the model is a GPT2LMHeadModel; {known}"
    model = made("Llama")
    model.__class__ = Mine
    assert refusal(model) == f"the model is a Mine; {known}"
    model.__class__ = type("LlamaForCausalLM", (LlamaForCausalLM,), {})
    assert refusal(model) == f"the model is a LlamaForCausalLM; {known}"


def with_part(path, make):
    def change(model):
        model.set_submodule(path, make(model.get_submodule(path)))

    return change


def with_attribute(path, name, value):
    def change(model):
        setattr(model.get_submodule(path), name, value)

    return change


def of_class(path, new_class):
    return with_attribute(path, "__class__", new_class)


def other_strides(model):
    head = model.lm_head
    head.weight = nn.Parameter(head.weight.detach().T.contiguous().T)


Q = "model.layers.0.self_attn.q_proj"
MLP = "model.layers.1.mlp"
CHANGES = {
    "a wrapped matrix": (with_part(Q, Adapted), f"{Q} is a Adapted; expected a torch.nn.Linear"),
    "a wrapped head": (with_part("lm_head", Adapted), "lm_head is a Adapted; expected a torch.nn.Linear"),
    "a matrix of a subclass": (of_class(Q, OtherLinear), f"{Q} is a OtherLinear; expected a torch.nn.Linear"),
    "another norm": (
        with_part("model.norm", lambda norm: nn.RMSNorm(32)),
        "model.norm is a RMSNorm; expected LlamaRMSNorm",
    ),
    "another MLP": (of_class(MLP, type("LlamaMLP", (LlamaMLP,), {})), f"{MLP} is a LlamaMLP; expected LlamaMLP"),
    "other embeddings": (
        of_class("model.embed_tokens", type("Embedding", (nn.Embedding,), {})),
        "model.embed_tokens is a Embedding; expected a torch.nn.Embedding",
    ),
    "another activation": (with_part(f"{MLP}.act_fn", lambda _: nn.ReLU()), f"{MLP}.act_fn is a ReLU; expected one of"),
    "no MLP": (with_attribute("model.layers.1", "mlp", None), f"the model has no {MLP}"),
    "a hook": (lambda model: model.get_submodule(MLP).register_forward_hook(print), f"{MLP} has forward hooks"),
    "a hook before": (
        lambda model: model.get_submodule(Q).register_forward_pre_hook(print),
        f"{Q} has forward hooks",
    ),
    "a hook of the model": (lambda model: model.register_forward_hook(print), "the model has forward hooks"),
    "a hook of embeddings": (
        lambda model: model.model.embed_tokens.register_forward_hook(print),
        "model.embed_tokens has forward hooks",
    ),
    "a forward": (with_attribute(MLP, "forward", print), f"{MLP} has a forward of its own"),
    "a forward of the model": (with_attribute("", "forward", print), "the model has a forward of its own"),
    "mixed dtypes": (
        lambda model: model.model.norm.bfloat16(),
        "model.norm.weight is torch.bfloat16 and model.embed_tokens.weight torch.float32; expected one dtype",
    ),
    "float64": (
        lambda model: model.double(),
        "model.layers.0.self_attn.q_proj.weight is torch.float64; expected float32, bfloat16 or float16",
    ),
    "another device": (lambda model: model.to("meta"), f"{Q}.weight is a Parameter on meta; expected a plain"),
    "columns apart": (other_strides, "lm_head.weight has strides (1, 97); expected rows in one piece"),
    "one that sees later tokens": (
        with_attribute("model.layers.0.self_attn", "is_causal", False),
        "model.layers.0.self_attn is not causal",
    ),
    "another layer's": (
        with_attribute("model.layers.0.self_attn", "layer_idx", 1),
        "model.layers.0.self_attn has layer_idx 1; expected 0",
    ),
    "a configuration that is not causal": (
        lambda model: setattr(model.config, "is_causal", False),
        "LlamaForCausalLM is configured with is_causal=False",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_with_a_part_that_is_otherwise_is_refused(change):
    make, message = CHANGES[change]
    model = made("Llama")
    make(model)
    assert refusal(model).startswith(message)


def test_dropout_is_refused():
    message = "the model is in training mode, with dropout; call model.eval()"
    assert refusal(made("Llama", attention_dropout=0.5).train()) == message
    NativeDecoder(made("Llama").train())


def test_weights_that_cannot_be_are_refused():
    assert refusal(made("Llama"), InvalidValueError, weights="int4") == "weights is 'int4'; expected None or 'int8'"
    message = "layer 0, down has 48 columns; int8 weights take multiples of 32"
    assert refusal(made("Llama"), weights="int8") == message


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x))),
        lambda self, x: torch.full_like(x, torch.nan),
        lambda self, x: self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x)),
    ],
    ids=["other", "no number", "exchanged"],
)
def test_what_nobody_thought_of_shows_in_the_logits(monkeypatch, forward):
    monkeypatch.setattr(LlamaMLP, "forward", forward)
    message = refusal(made("Llama"))
    assert message.startswith("the model's own forward gives other logits than its parts do: they are ")


def test_without_kernels_it_is_refused(no_kernels):
    assert refusal(made("Llama")).startswith("the native CPU kernels are not there (")


# Models that change later.


def test_numbers_changed_in_place_are_seen_at_once():
    model = made("Llama")
    decoder = NativeDecoder(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.7)
    assert_right(decoder, model)
    model.load_state_dict(llama(FLOAT32, seed=3).state_dict())
    assert_right(decoder, model)


def exchange_data(model):
    weight = model.get_submodule(Q).weight
    weight.data = 0.5 * weight.data


def exchange_parameter(model):
    module = model.get_submodule(MLP).up_proj
    module.weight = nn.Parameter(0.5 * module.weight.detach())


def exchange_linear(model):
    torch.manual_seed(4)
    model.get_submodule(MLP).down_proj = nn.Linear(*reversed(model.get_submodule(MLP).down_proj.weight.shape))


EXCHANGES = {
    "data": exchange_data,
    "parameter": exchange_parameter,
    "matrix": exchange_linear,
    "state": lambda model: model.load_state_dict(llama(FLOAT32, seed=3).state_dict(), assign=True),
    "layer": lambda model: model.set_submodule("model.layers.1", LlamaDecoderLayer(model.config, 1)),
    "positions": lambda model: model.set_submodule(
        "model.rotary_emb", llama(FLOAT32, **rope("linear", factor=2.0)).model.rotary_emb
    ),
    "embeddings": lambda model: model.set_input_embeddings(llama(FLOAT32, seed=3).get_input_embeddings()),
}


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_parts_exchanged_for_others_of_the_kind_are_read_anew(exchange):
    model = made("Llama")
    decoder = NativeDecoder(model)
    assert_right(decoder, model)
    EXCHANGES[exchange](model)
    assert_right(decoder, model)


def test_a_model_moved_to_another_dtype_is_read_anew():
    model = made("Llama", initializer_range=0.1)
    decoder, ids = NativeDecoder(model), IDS[0].tolist()
    model.to(torch.bfloat16)
    logits = in_chunks(decoder, pool_of(model), ids, [5, 35])
    assert_near(logits, uncached(copy.deepcopy(model).double(), ids), 0.02)
    assert decoder.description.head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "change",
    [
        "a wrapped matrix",
        "a hook",
        "a hook before",
        "a hook of the model",
        "a hook of embeddings",
        "a forward",
        "a forward of the model",
        "mixed dtypes",
        "float64",
    ],
)
def test_a_model_that_no_longer_fits_is_refused_in_every_step(change):
    make, message = CHANGES[change]
    model = made("Llama")
    decoder, pool = NativeDecoder(model), pool_of(model)
    sequence = pool.new_sequence()
    ids = IDS[0].tolist()
    advance(decoder, [sequence], [ids[:3]])
    make(model)
    for _ in range(2):
        with pytest.raises(NotSupportedError) as caught:
            advance(decoder, [sequence], [ids[3:6]])
        assert str(caught.value).startswith(message)
    assert sequence.seq_len == 3
    pool.check()


def test_decoding_one_token_at_a_time_notices_within_8_steps_and_then_in_every_step():
    model = made("Llama")
    decoder, pool = NativeDecoder(model), pool_of(model)
    sequence = pool.new_sequence()
    advance(decoder, [sequence], [[1, 2]])
    hook = model.model.layers[0].register_forward_hook(print)
    for _ in range(LOOK_EVERY - 1):
        advance(decoder, [sequence], [[3]])
    for _ in range(3):
        with pytest.raises(NotSupportedError, match=r"model\.layers\.0 has forward hooks"):
            advance(decoder, [sequence], [[3]])
    assert sequence.seq_len == 2 + LOOK_EVERY - 1
    hook.remove()
    advance(decoder, [sequence], [[3]])
    pool.check()


def test_data_exchanged_between_looks_is_still_there_to_be_read():
    model = made("Llama")
    decoder, pool = NativeDecoder(model), pool_of(model)
    sequence = pool.new_sequence()
    advance(decoder, [sequence], [IDS[0, :9].tolist()])
    before = copy.deepcopy(model).double()
    for parameter in model.parameters():
        parameter.data = torch.full_like(parameter, torch.nan)
    logits = advance(decoder, [sequence], [[3]])
    assert_near(logits[0], uncached(before, sequence.tokens)[-1])


def test_a_hook_that_goes_leaves_a_decoder_that_works():
    model = made("Llama")
    decoder, pool = NativeDecoder(model), pool_of(model)
    hook = model.model.layers[0].register_forward_hook(print)
    sequence = pool.new_sequence()
    with pytest.raises(NotSupportedError, match="has forward hooks"):
        advance(decoder, [sequence], [[1, 2]])
    hook.remove()
    assert_right(decoder, model)


def test_a_part_whose_logits_do_not_fit_is_refused_in_every_step(monkeypatch):
    model = made("Llama")
    decoder, pool = NativeDecoder(model), pool_of(model)
    sequence = pool.new_sequence()
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: self.down_proj(self.gate_proj(x)))
    exchange_linear(model)  # only so is it read anew
    for _ in range(2):
        with pytest.raises(NotSupportedError, match="gives other logits than its parts do"):
            advance(decoder, [sequence], [[1, 2]])


def test_int8_codes_are_made_anew_where_numbers_were_changed():
    model = made("Llama", **SIZES)
    decoder, ids = NativeDecoder(model, weights="int8"), IDS[0].tolist()
    for change in (
        lambda: model.get_submodule(Q).weight.mul_(0.5),
        lambda: exchange_data(model),
        lambda: model.load_state_dict(llama(FLOAT32, seed=3, **SIZES).state_dict()),
        lambda: exchange_parameter(model),
    ):
        with torch.no_grad():
            change()
        assert_near(in_chunks(decoder, pool_of(model), ids, FEW_AT_ONCE), uncached(decoded_model(model), ids))


def test_int8_codes_are_not_made_anew_for_nothing(monkeypatch):
    model = made("Llama", **SIZES)
    decoder, pool = NativeDecoder(model, weights="int8"), pool_of(model)
    codes = decoder.description.head.weight
    sequence = pool.new_sequence()
    for _ in range(3):
        advance(decoder, [sequence], [[1]])
    uncached(model, [1, 2, 3])
    advance(decoder, [sequence], [[1]])
    assert decoder.description.head.weight is codes


# Calls that fail.


def test_calls_that_fail_leave_all_as_it_was():
    model = made("Gemma3")
    decoder, pool = NativeDecoder(model), pool_of(model)
    sequence = pool.new_sequence()
    ids = IDS[0].tolist()
    advance(decoder, [sequence], [ids[:9]])
    free = pool.num_free
    for tokens, places, error, message in (
        ([97], None, InvalidValueError, "tokens has the id 97; expected ids below the vocabulary's 97"),
        ([1] * 30 + [97], None, InvalidValueError, "tokens has the id 97; expected ids below the vocabulary's 97"),
        ([1, 2], torch.tensor([2]), InvalidValueError, r"places holds 2; expected every entry in \[0, 1\]"),
        ([1, 2], torch.tensor([-1]), InvalidValueError, r"places holds -1; expected every entry in \[0, 1\]"),
        ([1, 2], torch.tensor([0.5]), InvalidTypeError, "places has dtype float32; expected integers"),
        ([1, 2], torch.tensor([[0]]), InvalidValueError, r"places has shape \(1, 1\); expected \(R,\) = \(any\)"),
    ):
        with pytest.raises(error, match=message):
            advance(decoder, [sequence], [tokens], places)
        assert (sequence.tokens, pool.num_free) == (ids[:9], free)
        pool.check()
    logits = advance(decoder, [sequence], [ids[9:11]], [1, 0])  # a list will do
    assert_near(logits, uncached(made("Gemma3", torch.float64), ids[:11])[-2:].flip(0))


def test_steps_that_do_not_fit_are_refused():
    decoder = NativeDecoder(made("Llama"))
    with pytest.raises(InvalidTypeError, match="step is a int; expected a Step"):
        decoder.forward_step(3)
    pool = BlockPool(CacheSpec([LayerSpec(2, 8)] * 3), num_blocks=8)
    with pytest.raises(InvalidValueError, match="the pool has 3 layers; expected the model's 2"):
        advance(decoder, [pool.new_sequence()], [[1]])
    assert pool.num_free == pool.num_blocks
    pool = pool_of(made("Llama"))
    with pool.step([pool.new_sequence()], [[1]]) as step:
        decoder.forward_step(step)
        with pytest.raises(InvalidValueError, match=r"layers \[0, 1\] are appended already; expected none"):
            decoder.forward_step(step)
    with pytest.raises(InvalidValueError, match="the step is over"):
        decoder.forward_step(step)
    with pool.step([pool.new_sequence()], [[1] * (FEW + 1)]) as step:
        decoder.forward_step(step)
        with pytest.raises(InvalidValueError, match="appended already"):
            decoder.forward_step(step)
    pool.check()
