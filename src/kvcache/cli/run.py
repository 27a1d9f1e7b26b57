"""One generation, timed: the prompt's ids in, the new ids and what they cost out."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from kvcache.hf import cache_for, use_attention
from kvcache.hf.attention import attention_is_exchangeable
from kvcache.hf.cache import ModelCache
from kvcache.hf.versions import CACHE_ARGUMENT
from kvcache.storage.codecs import Storage


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is picked, under transformers' names; a temperature of 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def generation_arguments(self) -> dict[str, Any]:
        """Return the arguments of transformers' `generate` that these options mean."""
        arguments: dict[str, Any] = {"do_sample": False, "repetition_penalty": self.repetition_penalty}
        if self.temperature > 0:
            arguments |= {"do_sample": True, "temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
            arguments["min_p"] = self.min_p or None
        return arguments


@dataclass(frozen=True)
class CacheAccount:
    """What the cache held when a run ended."""

    tokens: int  # seen
    nbytes: int  # of all buffers
    stored_nbytes: int  # of the rows that hold tokens
    token_nbytes: int  # of one token's rows in all layers
    storage: str


@dataclass(frozen=True)
class Run:
    """One finished generation."""

    prompt_tokens: int
    token_ids: list[int]  # the new ones
    first_token_seconds: float  # prefill and the first sample
    decode_seconds: float  # all later tokens
    stopped: bool  # at an end-of-text token, not at the limit
    cache: CacheAccount | None  # None: every step computed the whole sequence again

    @property
    def total_seconds(self) -> float:
        """Seconds from the prompt to the last token."""
        return self.first_token_seconds + self.decode_seconds

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens over the time to the first token."""
        return self.prompt_tokens / self.first_token_seconds

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens after the first over the time they took; None where there are none."""
        later = len(self.token_ids) - 1
        return later / self.decode_seconds if later else None


def generate(
    model: Any,
    prompt_ids: list[int],
    *,
    max_new_tokens: int,
    min_new_tokens: int,
    sampling: SamplingOptions,
    use_cache: bool,
    storage: Storage | None = None,
    on_token: Callable[[list[int]], None],
) -> Run:
    """Continue `prompt_ids` with `model`; `on_token` gets each new token as it comes.

    `storage` says how the cache keeps rows; default: in the model's dtype.
    """
    input_ids = torch.tensor([prompt_ids], device=model.device)
    # The last token is sampled and never processed, so it needs no room.
    max_tokens = len(prompt_ids) + max_new_tokens - 1
    cache = cache_for(model, max_tokens, storage=storage) if use_cache else None
    model.generation_config.cache_implementation = None  # some models ask for one of transformers' own
    clock = _Clock(on_token)
    torch.manual_seed(sampling.seed)
    clock.start()
    with use_attention(model) if attention_is_exchangeable(model) else nullcontext():
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens or None,
            use_cache=use_cache,
            streamer=clock,
            **({CACHE_ARGUMENT: cache} if use_cache else {}),
            **sampling.generation_arguments(),
        )
    token_ids = output[0, len(prompt_ids) :].tolist()
    return Run(
        prompt_tokens=len(prompt_ids),
        token_ids=token_ids,
        first_token_seconds=clock.times[1] - clock.times[0],
        decode_seconds=clock.times[-1] - clock.times[1],
        stopped=token_ids[-1] in _end_ids(model),
        cache=_account(cache) if isinstance(cache, ModelCache) else None,
    )


def warm_up(model: Any, prompt_ids: list[int]) -> None:
    """Process the prompt's first tokens once, so that no timed run pays for what a process does once."""
    with torch.inference_mode():
        model(torch.tensor([prompt_ids[:64]], device=model.device), use_cache=False)


class _Clock(BaseStreamer):
    """Notes when each token came: transformers hands a streamer the prompt first, then token after token."""

    def __init__(self, on_token: Callable[[list[int]], None]) -> None:
        self.times: list[float] = []
        self._on_token = on_token
        self._prompt_seen = False

    def start(self) -> None:
        self.times.append(time.perf_counter())

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self.times.append(time.perf_counter())
            self._on_token(value.flatten().tolist())
        self._prompt_seen = True

    def end(self) -> None:
        pass


def _end_ids(model: Any) -> set[int]:
    end = model.generation_config.eos_token_id
    return set(end) if isinstance(end, list) else {end}


def _account(cache: ModelCache) -> CacheAccount:
    layer = cache.layers[0].rows
    assert layer is not None  # a run has processed the prompt at least
    return CacheAccount(cache.get_seq_length(), cache.nbytes, cache.stored_nbytes, cache.token_nbytes, layer.storage)
