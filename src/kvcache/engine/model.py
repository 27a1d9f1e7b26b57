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

# What a `generation_config` can ask for that changes which tokens come, and that an engine has no option for.
NOT_DONE = {
    "bad_words_ids",
    "begin_suppress_tokens",
    "constraints",
    "dola_layers",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "force_words_ids",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "guidance_scale",
    "min_length",
    "no_repeat_ngram_size",
    "num_beams",
    "penalty_alpha",
    "sequence_bias",
    "suppress_tokens",
    "token_healing",
    "top_h",
    "typical_p",
    "watermarking_config",
}


def spec_of(model: Any) -> CacheSpec:
    """Return what a decoder keeps of a token, if it can run over steps of a pool: one token is tried.

    Raises:
        NotSupportedError: it cannot, and why.
    """
    try:
        spec = CacheSpec.from_config(model.config)
        pool = BlockPool(spec, num_blocks=1, block_size=1, storage=model.dtype, device=model.device)
        step = pool.step([pool.new_sequence()], [[0]])
        with torch.no_grad():
            forward_step(model, step)
    except InvalidValueError as error:
        raise NotSupportedError(str(error)) from error
    step.abort()
    return spec


def warn_of_what_is_not_done(config: GenerationConfig) -> None:
    """Say what a model's `generation_config` asks for, and what an engine has no option for."""
    asked = config.to_diff_dict()
    if ignored := [f"{name}={asked[name]!r}" for name in sorted(NOT_DONE & asked.keys())]:
        warnings.warn(
            f"the model's generation_config has {', '.join(ignored)}, which only model.generate does",
            stacklevel=3,
        )


def longest_text(model: Any) -> int | None:
    """Return how many tokens a text of a model may have here, None without a limit."""
    limits = [context_of(model)]
    if (unchanged := unchanged_positions(decoder_config(model.config))) is not None:
        limits.append(unchanged.num_tokens)
    return min((limit for limit in limits if limit is not None), default=None)


def fitting_here(model: Any, num_tokens: int) -> int:
    """Return how many new tokens the context, and positions that do not depend on the length, leave room for.

    Raises:
        InvalidValueError: the prompt itself is too long.
    """
    fitting = fitting_new_tokens(model, num_tokens)
    unchanged = unchanged_positions(decoder_config(model.config))
    if unchanged is None:
        return fitting
    if num_tokens > unchanged.num_tokens:
        raise InvalidValueError(
            f"the prompt has {num_tokens:,} tokens; rotary positions of type {unchanged.rope_type!r} change "
            f"beyond {unchanged.num_tokens:,}, expected at most those"
        )
    return min(fitting, unchanged.num_tokens - num_tokens + 1)
