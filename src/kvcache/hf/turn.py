"""One call of a session: which of its states the text goes on from, what `generate` is asked for, and how it ended."""

import itertools
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers.generation.streamers import BaseStreamer

from kvcache.errors import InvalidValueError, RollbackError
from kvcache.hf.cache import ModelCache
from kvcache.hf.prompt import Prompt, check_known_ids, prompt_ids
from kvcache.hf.versions import CACHE_ARGUMENT

# What a session says to `generate` itself.
_OWN_ARGUMENTS = {
    *("inputs", "input_ids", "inputs_embeds", "attention_mask", "position_ids", "generation_config", "streamer"),
    *("cache", "past_key_values", "use_cache", "cache_implementation", "return_dict_in_generate"),
}


@dataclass(frozen=True)
class Usage:
    """What one call took, in tokens."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt: their keys and values were there
    computed_tokens: int  # of the prompt: the others, at least the last one
    completion_tokens: int  # new ones


class Request:
    """What a call is asked for, checked: the ids of the prompt, and options of `generate`.

    Raises:
        InvalidTypeError, InvalidValueError: see `Session.generate`.
    """

    def __init__(self, model: Any, tokenizer: Any, prompt: Prompt, options: dict[str, Any]) -> None:
        for name in sorted(_OWN_ARGUMENTS & options.keys()):
            raise InvalidValueError(f"{name} is set by the session; expected options of GenerationConfig by name")
        for name in ("num_beams", "num_return_sequences"):
            number = options.get(name, getattr(model.generation_config, name, None))
            if number not in (None, 1):
                raise InvalidValueError(
                    f"{name} is {number}; expected 1, as a session is one text (fork it for others)"
                )
        self.model, self.tokenizer, self.options = model, tokenizer, options
        self.ids = prompt_ids(tokenizer, prompt)
        check_known_ids(model, self.ids)


class Turn:
    """A request under way, on a fork of the state that has most of its text cached."""

    def __init__(self, request: Request, states: Iterable[ModelCache]) -> None:
        reusable = [(_num_reusable(state, request.ids), state) for state in states]
        self.num_cached, state = max(reusable, key=lambda pair: pair[0])  # of equals the first
        self.request = request
        self.cache = state.fork()
        self.cache.crop(self.num_cached - self.cache.get_seq_length())
        self.new_ids: list[int] = []

    def run(self, streamer: BaseStreamer | None = None) -> list[int]:
        """Let the model generate, and return the new ids."""
        request = self.request
        input_ids = torch.tensor([request.ids], device=request.model.device)
        pad = request.model.generation_config.pad_token_id
        if pad is None:  # nothing is padded, but releases of transformers differ in whether they warn without one
            pad = next(iter(self._end_ids), None)
        arguments = {
            "attention_mask": torch.ones_like(input_ids),
            "use_cache": True,
            "cache_implementation": None,  # some models ask for one of transformers' own
            "return_dict_in_generate": False,
            "pad_token_id": pad,
            CACHE_ARGUMENT: self.cache,
            **({"tokenizer": request.tokenizer} if "stop_strings" in request.options else {}),
            **request.options,
        }
        output = request.model.generate(input_ids, streamer=streamer, **arguments)
        new_ids: list[int] = output[0, len(request.ids) :].tolist()
        return new_ids

    def end(self) -> Usage:
        """Leave in the cache what belongs there, and return what the call took."""
        prompt_tokens, completion_tokens = len(self.request.ids), len(self.new_ids)
        num_ahead = self.cache.get_seq_length() - (prompt_tokens + completion_tokens - 1)
        if num_ahead > 0:  # on a GPU transformers computes a token ahead of those that it hands out
            with suppress(RollbackError):
                self.cache.crop(-num_ahead)
        return Usage(prompt_tokens, self.num_cached, prompt_tokens - self.num_cached, completion_tokens)

    @property
    def finish_reason(self) -> Literal["stop", "length"]:
        """Whether an end token, a stop string or a criterion of the caller's ended it, or a limit (tokens, time)."""
        if self.new_ids[-1] in self._end_ids or self._ends_with_stop_string:
            return "stop"
        limit = self._option("max_new_tokens")
        if limit is None and (length := self._option("max_length")) is not None:
            limit = length - len(self.request.ids)
        is_short = limit is not None and len(self.new_ids) < limit
        return "stop" if is_short and self._option("max_time") is None else "length"

    @property
    def _ends_with_stop_string(self) -> bool:
        strings = self._option("stop_strings") or ()
        text = self.request.tokenizer.decode(self.new_ids)
        return any(string in text for string in ((strings,) if isinstance(strings, str) else strings))

    def _option(self, name: str) -> Any:
        return self.request.options.get(name, getattr(self.request.model.generation_config, name, None))

    @property
    def _end_ids(self) -> list[int]:
        ends = self.request.options.get("eos_token_id", self.request.model.generation_config.eos_token_id)
        return [] if ends is None else torch.as_tensor(ends).flatten().tolist()


def tokens_of(cache: ModelCache) -> list[int]:
    """Return the ids of the tokens whose keys and values a cache of one text holds."""
    known = cache.known_tokens()
    return [] if known is None else known[0].tolist()


def _num_reusable(state: ModelCache, ids: list[int]) -> int:
    """Return how many of the leading `ids`, but for the last one, a state has keys and values of.

    0 where a window cannot go back to their end.
    """
    pairs = zip(tokens_of(state), ids[:-1], strict=False)
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    can_go_back = all(layer.can_crop(common - state.get_seq_length()) for layer in state.layers)
    return common if can_go_back else 0
