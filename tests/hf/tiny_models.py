"""Random decoders small enough to run in milliseconds, in float64, whose greedy text varies."""

from typing import Any

import torch
from transformers import (
    BartForConditionalGeneration,
    BloomForCausalLM,
    DeepseekV3ForCausalLM,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    GemmaForCausalLM,
    GPT2LMHeadModel,
    GPTNeoXForCausalLM,
    GptOssForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    MixtralForCausalLM,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    T5ForConditionalGeneration,
)

VOCAB = 97
PAD = 0
WINDOW = 5

# Rotary settings of models with 16 positions, and the length beyond which they change.
CHANGING_POSITIONS = {
    "dynamic": ({"rope_type": "dynamic", "factor": 2.0}, 16),
    "longrope": (
        {
            "rope_type": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 8,
        },
        8,
    ),
}

_TOKENS = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": PAD}
_DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,
    **_TOKENS,
}
_GEMMA = _DECODER | {"head_dim": 8, "query_pre_attn_scalar": 8, "tie_word_embeddings": False}
# The other ways to run experts have no float64.
_EXPERTS = _DECODER | {"num_experts_per_tok": 2, "experts_implementation": "eager"}


def _made(model_class: Any, settings: dict[str, Any], dtype: torch.dtype, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = model_class(model_class.config_class(**settings))
    _vary_constants(model)
    return model.to(dtype).eval()


def _vary_constants(model: PreTrainedModel) -> None:
    """Add noise to what starts as all zeros or all ones (norms, biases), where a fault in its use would not show."""
    with torch.no_grad():
        for numbers in (*model.parameters(), *model.buffers()):
            if numbers.numel() > 1 and (numbers == numbers.flatten()[0]).all():
                numbers += 0.2 * torch.randn_like(numbers)


def llama(dtype: torch.dtype = torch.float64, seed: int = 0, **options) -> PreTrainedModel:
    """Grouped-query attention, full in every layer."""
    return _made(LlamaForCausalLM, _DECODER | options, dtype, seed)


def mistral(dtype: torch.dtype = torch.float64, seed: int = 0, window: int = 6, **options) -> PreTrainedModel:
    """A sliding window in every layer."""
    return _made(MistralForCausalLM, _DECODER | {"sliding_window": window} | options, dtype, seed)


def gemma3(dtype: torch.dtype = torch.float64, seed: int = 0, window: int = 5, **options) -> PreTrainedModel:
    """Sliding, sliding, full."""
    layers = ["sliding_attention", "sliding_attention", "full_attention"]
    settings = _GEMMA | {"num_hidden_layers": 3, "layer_types": layers, "sliding_window": window}
    return _made(Gemma3ForCausalLM, settings | options, dtype, seed)


def gpt2(dtype: torch.dtype = torch.float64, seed: int = 0, **options) -> PreTrainedModel:
    """Learned positions, as many key/value heads as query heads."""
    settings = {
        "vocab_size": VOCAB,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "initializer_range": 0.4,
        "tie_word_embeddings": False,
        **_TOKENS,
    }
    return _made(GPT2LMHeadModel, settings | options, dtype, seed)


def qwen2(dtype: torch.dtype = torch.float64, seed: int = 0, **options) -> PreTrainedModel:
    """Full, then sliding; biases on queries, keys and values."""
    sliding = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    return _made(Qwen2ForCausalLM, _DECODER | sliding | options, dtype, seed)


def qwen3(dtype: torch.dtype = torch.float64, seed: int = 0, **options) -> PreTrainedModel:
    """Norms of queries and keys, and heads wider than the hidden size says."""
    return _made(Qwen3ForCausalLM, _DECODER | {"head_dim": 12} | options, dtype, seed)


def gemma(dtype: torch.dtype = torch.float64, seed: int = 0, **options) -> PreTrainedModel:
    """One key/value head for all query heads, and embeddings that are scaled."""
    return _made(GemmaForCausalLM, _DECODER | {"head_dim": 8, "num_key_value_heads": 1} | options, dtype, seed)


def gemma2(dtype: torch.dtype = torch.float64, seed: int = 0, **options) -> PreTrainedModel:
    """Sliding, full; scores and logits soft-capped low enough to matter. Its attention is eager: SDPA knows no cap."""
    caps = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0}
    return _made(Gemma2ForCausalLM, _GEMMA | caps | {"sliding_window": WINDOW} | options, dtype, seed)


def phi3(dtype: torch.dtype = torch.float64, seed: int = 0, **options) -> PreTrainedModel:
    """A sliding window in every layer; one projection for queries, keys and values."""
    return _made(Phi3ForCausalLM, _DECODER | {"sliding_window": 6} | options, dtype, seed)


def gpt_neox(dtype: torch.dtype = torch.float64, seed: int = 0, **options) -> PreTrainedModel:
    """Its layers name the cache `layer_past` and tell it nothing but keys, values and their number."""
    settings = {name: value for name, value in _DECODER.items() if name != "num_key_value_heads"}
    return _made(GPTNeoXForCausalLM, settings | {"rotary_pct": 0.5} | options, dtype, seed)


def mixtral(dtype: torch.dtype = torch.float64, seed: int = 0, **options) -> PreTrainedModel:
    """Two of four experts for each token."""
    return _made(MixtralForCausalLM, _EXPERTS | {"num_local_experts": 4} | options, dtype, seed)


def gpt_oss(dtype: torch.dtype = torch.float64, seed: int = 0, **options) -> PreTrainedModel:
    """Sliding, full; a learned sink for each head. Its attention is eager: SDPA knows no sinks."""
    settings = _EXPERTS | {
        "head_dim": 8,
        "sliding_window": WINDOW,
        "num_local_experts": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return _made(GptOssForCausalLM, settings | options, dtype, seed)


def deepseek_v3(dtype: torch.dtype = torch.float64, seed: int = 0, **options) -> PreTrainedModel:
    """One latent and one rotated key for all heads, expanded after the cache (MLA).

    No layer has experts: their router is float32 in any model, and rounds differently with the number of rows.
    """
    settings = _DECODER | {
        "num_key_value_heads": 4,
        "kv_lora_rank": 10,
        "q_lora_rank": 12,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 6,
        "first_k_dense_replace": 2,
        "num_mtp_layers": 0,
    }
    return _made(DeepseekV3ForCausalLM, settings | options, dtype, seed)


FAMILIES = {"llama": llama, "mistral": mistral, "gemma3": gemma3, "gpt2": gpt2}
# With the kinds of attention that `FAMILIES`, which most tests run on, leave out.
ALL_FAMILIES = FAMILIES | {
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma2": gemma2,
    "phi3": phi3,
    "gpt_neox": gpt_neox,
    "mixtral": mixtral,
    "gpt_oss": gpt_oss,
    "deepseek_v3": deepseek_v3,
}


def bloom(dtype: torch.dtype = torch.float64, seed: int = 0, **options) -> PreTrainedModel:
    """Biases that grow with the distance (ALiBi), in attention that cannot be exchanged."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.4}
    return _made(BloomForCausalLM, {**sizes, **_TOKENS, **options}, dtype, seed)


def t5(dtype: torch.dtype = torch.float64, seed: int = 0) -> PreTrainedModel:
    """An encoder-decoder with relative positions."""
    settings = {
        "vocab_size": VOCAB,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "initializer_factor": 4.0,
        "tie_word_embeddings": False,
        "eos_token_id": None,
        "pad_token_id": PAD,
        "decoder_start_token_id": PAD,
    }
    return _made(T5ForConditionalGeneration, settings, dtype, seed)


def bart(dtype: torch.dtype = torch.float64, seed: int = 0) -> PreTrainedModel:
    """An encoder-decoder that reads the cross-attention rows straight from the layers."""
    settings = {
        "vocab_size": VOCAB,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "max_position_embeddings": 64,
        "init_std": 0.1,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": None,
        "forced_eos_token_id": None,
        "pad_token_id": PAD,
        "decoder_start_token_id": 2,
    }
    return _made(BartForConditionalGeneration, settings, dtype, seed)


ENCODER_DECODERS = {"t5": t5, "bart": bart}
POOLED = [name for name in ALL_FAMILIES if name != "deepseek_v3"]  # those that a step of a pool serves
