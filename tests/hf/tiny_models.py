"""Random decoders small enough to run in milliseconds, in float64, whose greedy text varies."""

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

VOCAB = 97
PAD = 0
WINDOW = 5

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


def _ready(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    return model.to(dtype).eval()


def llama(dtype: torch.dtype = torch.float64, seed: int = 0, **options) -> PreTrainedModel:
    """Grouped-query attention, full in every layer."""
    torch.manual_seed(seed)
    return _ready(LlamaForCausalLM(LlamaConfig(**(_DECODER | options))), dtype)


def mistral(dtype: torch.dtype = torch.float64, seed: int = 0, window: int = 6, **options) -> PreTrainedModel:
    """A sliding window in every layer."""
    torch.manual_seed(seed)
    return _ready(MistralForCausalLM(MistralConfig(sliding_window=window, **(_DECODER | options))), dtype)


def gemma3(dtype: torch.dtype = torch.float64, seed: int = 0, window: int = 5, **options) -> PreTrainedModel:
    """Sliding, sliding, full."""
    torch.manual_seed(seed)
    settings = _DECODER | {
        "num_hidden_layers": 3,
        "head_dim": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 8,
        "tie_word_embeddings": False,
    }
    return _ready(Gemma3ForCausalLM(Gemma3TextConfig(sliding_window=window, **(settings | options))), dtype)


def gpt2(dtype: torch.dtype = torch.float64, seed: int = 0, **options) -> PreTrainedModel:
    """Learned positions, as many key/value heads as query heads."""
    torch.manual_seed(seed)
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
    return _ready(GPT2LMHeadModel(GPT2Config(**(settings | options))), dtype)


FAMILIES = {"llama": llama, "mistral": mistral, "gemma3": gemma3, "gpt2": gpt2}


def t5(dtype: torch.dtype = torch.float64, seed: int = 0) -> PreTrainedModel:
    """An encoder-decoder with relative positions."""
    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=VOCAB,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        initializer_factor=4.0,
        tie_word_embeddings=False,
        eos_token_id=None,
        pad_token_id=PAD,
        decoder_start_token_id=PAD,
    )
    return _ready(T5ForConditionalGeneration(config), dtype)


def bart(dtype: torch.dtype = torch.float64, seed: int = 0) -> PreTrainedModel:
    """An encoder-decoder that reads the cross-attention rows straight from the layers."""
    torch.manual_seed(seed)
    config = BartConfig(
        vocab_size=VOCAB,
        d_model=32,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=64,
        init_std=0.1,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=None,
        forced_eos_token_id=None,
        pad_token_id=PAD,
        decoder_start_token_id=2,
    )
    return _ready(BartForConditionalGeneration(config), dtype)
