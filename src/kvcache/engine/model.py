"""What an engine has to know of a model: whether it can run there, and how long texts may be."""

import warnings
from typing import Any

import torch
from transformers import GenerationConfig

from kvcache.errors import InvalidValueError, NotSupportedError
from kvcache.hf import forward_step
from kvcache.hf.cache import unchanged_positions
from kvcache.hf.prompt import context_of, fitting_new_tokens
from kvcache.storage import BlockPool, CacheSpec
from kvcache.storage.model_config import decoder_config

# What a `generation_config` can say that changes which tokens come, and that an engine has no option for; each with the
# value that, beside None, changes nothing.
NOT_DONE: dict[str, Any] = {
    "bad_words_ids": [],
    "begin_suppress_tokens": [],
    "constraints": [],
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "force_words_ids": [],
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1.0,
    "max_time": None,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": 0.0,
    "remove_invalid_values": False,
    "sequence_bias": None,
    "suppress_tokens": [],
    "token_healing": False,
    "top_h": None,
    "typical_p": 1.0,
    "watermarking_config": None,
}


def spec_of(model: Any) -> CacheSpec:
    """Return what a decoder keeps of a token, if it can run over steps of a pool: two tokens are tried.

    Raises:
        NotSupportedError: it cannot, and why.
    """
    try:
        spec = CacheSpec.from_config(model.config)
    except InvalidValueError as error:
        raise NotSupportedError(str(error)) from error
    pool = BlockPool(spec, num_blocks=2, block_size=1, storage=model.dtype, device=model.device)
    step = pool.step([pool.new_sequence()], [[0, 0]])
    try:
        with torch.no_grad():
            forward_step(model, step)
    except InvalidValueError as error:
        raise NotSupportedError(str(error)) from error
    step.abort()
    return spec


def warn_of_what_is_not_done(config: GenerationConfig) -> None:
    """Say what a model's `generation_config` asks for, and what an engine has no option for."""
    asked = {name: getattr(config, name, None) for name in NOT_DONE}
    if ignored := [f"{name}={value!r}" for name, value in asked.items() if value not in (None, NOT_DONE[name])]:
        warnings.warn(
            f"the model's generation_config has {', '.join(ignored)}, which only model.generate does",
            stacklevel=3,
        )


def longest_text(model: Any) -> int | None:
    """Return how many tokens of a text of a model can be stored, None without a limit."""
    limits = [context_of(model)]
    if (unchanged := unchanged_positions(decoder_config(model.config))) is not None:
        limits.append(unchanged.num_tokens)
    return min((limit for limit in limits if limit is not None), default=None)


def fitting_in_engine(model: Any, num_tokens: int) -> int:
    """Return how many new tokens fit behind a prompt of so many; the last one is sampled and takes no place.

    Raises:
        InvalidValueError: the prompt itself is too long.
    """
    fitting = fitting_new_tokens(model, num_tokens)
    longest = longest_text(model)
    if longest is None or num_tokens <= longest:
        return fitting if longest is None else longest - num_tokens + 1
    unchanged = unchanged_positions(decoder_config(model.config))
    assert unchanged is not None  # as the context is long enough
    raise InvalidValueError(
        f"the prompt has {num_tokens:,} tokens; rotary positions of type {unchanged.rope_type!r} change "
        f"beyond {unchanged.num_tokens:,}, expected at most those"
    )
