"""`CacheSpec.from_config` against what models of transformers hand to their cache."""

import re

import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BertConfig,
    DynamicCache,
    EncoderDecoderCache,
    EncoderDecoderConfig,
    Gemma3Config,
    GenerationConfig,
    LlamaConfig,
)

from kvcache import CacheSpec, InvalidTypeError, InvalidValueError, LayerSpec
from tests.hf.older_releases import IS_OLDER
from tests.hf.runs import ids_of
from tests.hf.tiny_models import FAMILIES, VOCAB, bart, t5

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = 5
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
HYBRID = GROUPED | {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
GPT = {"vocab_size": VOCAB, "n_embd": 48, "n_layer": 2, "n_head": 4}
HEADS_OF_10 = {"head_dim": 10}
EXPERTS = {"num_experts_per_tok": 1, "moe_intermediate_size": 8}
MODELS = {
    "Llama": ("Llama", GROUPED),
    "Llama, one head": ("Llama", GROUPED | {"num_key_value_heads": 1}),
    "Llama, heads not told": ("Llama", SIZES),
    "Llama, head size": ("Llama", GROUPED | HEADS_OF_10),
    "Mistral": ("Mistral", GROUPED | {"sliding_window": 3}),
    "Mistral, full": ("Mistral", GROUPED | {"sliding_window": None}),
    "Mixtral": ("Mixtral", GROUPED | {"num_local_experts": 2}),
    "Qwen2": ("Qwen2", GROUPED),
    "Qwen2, one full": ("Qwen2", GROUPED | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    "Qwen3": ("Qwen3", GROUPED | HEADS_OF_10),
    "Gemma": ("Gemma", GROUPED | HEADS_OF_10),
    "Gemma2": ("Gemma2", HYBRID | HEADS_OF_10),
    "Gemma3Text": ("Gemma3Text", HYBRID | HEADS_OF_10),
    "Gemma4Text": (
        "Gemma4Text",
        HYBRID
        | HEADS_OF_10
        | {
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 4,
            "vocab_size_per_layer_input": VOCAB,
        },
    ),
    "Cohere2": ("Cohere2", HYBRID),
    "Olmo2": ("Olmo2", GROUPED),
    "Olmo3": ("Olmo3", HYBRID),
    "GptOss": ("GptOss", HYBRID | HEADS_OF_10 | {"num_local_experts": 2, "num_experts_per_tok": 1}),
    "Granite": ("Granite", GROUPED),
    "Phi": ("Phi", GROUPED),
    "Phi3": ("Phi3", GROUPED),
    "StableLm": ("StableLm", GROUPED | {"partial_rotary_factor": 0.5}),
    "ModernBertDecoder": (
        "ModernBertDecoder",
        SIZES | {"local_attention": 6, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "MiMoV2Flash": (
        "MiMoV2Flash",
        HYBRID | HEADS_OF_10 | EXPERTS | {"v_head_dim": 6, "n_routed_experts": 2, "mlp_layer_types": ["dense"] * 2},
    ),
    "GPTNeoX": ("GPTNeoX", SIZES),
    "OPT": ("OPT", SIZES | {"ffn_dim": 16, "word_embed_proj_dim": 48}),
    "Bloom": ("Bloom", {"vocab_size": VOCAB, "hidden_size": 48, "n_layer": 2, "n_head": 4}),
    "GPTJ": ("GPTJ", GPT | {"rotary_dim": 4}),
    "Mpt": ("Mpt", {"vocab_size": VOCAB, "d_model": 48, "n_layers": 2, "n_heads": 4, "max_seq_len": 32}),
    "CpmAnt": ("CpmAnt", SIZES | {"dim_head": 10, "dim_ff": 16}),
    "Falcon, one head": ("Falcon", SIZES | {"multi_query": True}),
    "Falcon, plain": ("Falcon", SIZES | {"multi_query": False}),
    "Falcon, new": ("Falcon", SIZES | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "GPTBigCode, one head": ("GPTBigCode", GPT | {"multi_query": True}),
    "GPTBigCode, plain": ("GPTBigCode", GPT | {"multi_query": False}),
}


def config_of(name, options):
    if IS_OLDER and not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"this transformers has no {name}")
    return getattr(transformers, f"{name}Config")(**options)


def kept_by(cache):
    return tuple(
        LayerSpec(
            layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3], getattr(layer, "sliding_window", None)
        )
        for layer in cache.layers
    )


def run(model):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model.eval()(ids_of(TOKENS), cache=cache)
    return cache


@pytest.mark.parametrize("name", MODELS)
def test_the_spec_is_what_the_model_keeps(name):
    config = config_of(*MODELS[name])
    before = config.to_dict()
    spec = CacheSpec.from_config(config)
    assert config.to_dict() == before
    assert spec.layers == kept_by(run(AutoModelForCausalLM.from_config(config)))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_bytes_of_a_token_are_those_the_model_keeps(family):
    model = FAMILIES[family]()
    cache, spec = run(model), CacheSpec.from_config(model.config)
    assert spec.layers == kept_by(cache)
    assert spec.token_nbytes("float64") == sum(
        rows[:, :, 0].nbytes for layer in cache.layers for rows in (layer.keys, layer.values)
    )


@pytest.mark.parametrize("make", [bart, t5])
def test_an_encoder_decoder_stands_for_its_decoder(make):
    model = make()
    decoder = model.config.get_text_config(decoder=True)
    cache = EncoderDecoderCache(DynamicCache(config=decoder), DynamicCache(config=decoder))
    with torch.no_grad():
        model(input_ids=ids_of(7), decoder_input_ids=ids_of(TOKENS), cache=cache)
    assert CacheSpec.from_config(model.config).layers == kept_by(cache.self_attention_cache)


def test_a_decoder_may_have_other_heads_than_its_encoder():
    config = BartConfig(d_model=32, decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=2)
    assert CacheSpec.from_config(config).layers == (LayerSpec(2, 16),) * 3


def test_a_model_of_several_parts_stands_for_its_text_part():
    text = config_of(*MODELS["Gemma3Text"])
    assert CacheSpec.from_config(Gemma3Config(text_config=text)) == CacheSpec.from_config(text)
    parts = EncoderDecoderConfig.from_encoder_decoder_configs(BertConfig(), text)
    assert CacheSpec.from_config(parts) == CacheSpec.from_config(text)


def test_layers_may_have_sizes_of_their_own():
    config = LlamaConfig(**GROUPED, per_layer_config={1: {"num_key_value_heads": 1, "head_dim": 6}})
    assert CacheSpec.from_config(config).layers == (LayerSpec(2, 12), LayerSpec(1, 6))
    config = config_of("Step3p7Text", HYBRID | HEADS_OF_10 | {"num_sliding_attention_heads": 6})
    assert CacheSpec.from_config(config).layers == (LayerSpec(2, 10, window=3), LayerSpec(2, 10))


@pytest.mark.parametrize(
    ("name", "options", "layer", "kind"),
    [
        ("Llama4Text", {}, 0, "chunked_attention"),
        ("Mamba", {}, 0, "linear_attention"),
        ("Jamba", {}, 0, "linear_attention"),
        ("Zamba2", {}, 0, "linear_attention"),
        ("Qwen3Next", {"num_hidden_layers": 4}, 0, "linear_attention"),
        ("NemotronH", {"layer_types": ["full_attention", "moe"]}, 1, "moe"),
        ("Lfm2", {"num_hidden_layers": 2, "layer_types": ["full_attention", "conv"]}, 1, "conv"),
        ("FalconH1", {"num_hidden_layers": 2}, 0, "hybrid"),
        ("DeepseekV32", {"num_hidden_layers": 2}, 0, "indexed_attention"),
        ("DeepseekV4", {"num_hidden_layers": 2}, 0, "heavily_compressed_attention"),
    ],
)
def test_layers_of_other_kinds_are_refused_by_number_and_kind(name, options, layer, kind):
    message = (
        f"layer {layer} of the model is of kind '{kind}'; expected full_attention or sliding_attention in every layer"
    )
    with pytest.raises(InvalidValueError, match=message):
        CacheSpec.from_config(config_of(name, options))


@pytest.mark.parametrize(
    ("name", "options", "layer"),
    [("Gemma3nText", {}, 20), ("Gemma4Text", {"num_hidden_layers": 12, "num_kv_shared_layers": 4}, 8)],
)
def test_layers_that_reuse_the_rows_of_another_are_refused(name, options, layer):
    message = f"layer {layer} of the model is of kind 'sliding_attention' with the rows of another layer; expected"
    with pytest.raises(InvalidValueError, match=message):
        CacheSpec.from_config(config_of(name, options))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("DeepseekV3", {}, "layer 0 of the model has kv_lora_rank=512: layers keep one latent for all heads (MLA)"),
        ("MllamaText", {}, "layer 0 of the model has cross_attention_layers=[3, 8,"),
        ("Dory", {}, "layer 0 of the model has n_recurrent_loops=2: layers run several times"),
        ("Reformer", {}, "layer 0 of the model has attn_layers=('local', 'lsh'"),
        ("OpenAIGPT", {}, "OpenAIGPTConfig has no use_cache; expected a model that can use a cache"),
        ("Rwkv", {}, "RwkvConfig has num_attention_heads=None; expected an integer >= 1"),
        ("Blt", {}, "BltConfig has num_hidden_layers=None; expected an integer >= 1"),
        ("T5", {"num_layers": 2, "num_decoder_layers": 3}, "T5Config has num_decoder_layers=3 and num_hidden_layers=2"),
        (
            "Bart",
            {"encoder_attention_heads": 4, "decoder_attention_heads": 2, "is_encoder_decoder": False},
            "BartConfig has decoder_attention_heads=2 and num_attention_heads=4; expected the same",
        ),
        ("Llama", GROUPED | {"layer_types": ["sliding_attention"] * 2}, "LlamaConfig has sliding_window=None"),
        (
            "Mistral",
            GROUPED | {"per_layer_config": {0: {"sliding_window": 3}, 1: {"sliding_window": 4}}},
            "layers have the windows and sinks [(3, 0), (4, 0)]; expected one for all sliding layers",
        ),
    ],
)
def test_what_is_not_told_or_kept_otherwise_is_refused(name, options, message):
    with pytest.raises(InvalidValueError, match=re.escape(message)):
        CacheSpec.from_config(config_of(name, options))


def test_kinds_for_another_number_of_layers_are_refused():
    config = LlamaConfig(**GROUPED)
    config.layer_types = ["full_attention"]
    with pytest.raises(InvalidValueError, match="layer_types has 1 entries; expected num_hidden_layers=2"):
        CacheSpec.from_config(config)


@pytest.mark.parametrize(
    "config", [None, "llama", SIZES, LlamaConfig, GenerationConfig()], ids=["None", "str", "dict", "class", "other"]
)
def test_what_is_no_configuration_is_refused(config):
    message = f"config is a {type(config).__name__}; expected a configuration of transformers, for instance model.conf"
    with pytest.raises(InvalidTypeError, match=message):
        CacheSpec.from_config(config)
