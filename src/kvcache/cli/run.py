"""One generation, timed: through an engine, or through the model's own forward, with a cache or without one.

Whichever way a text comes, its tokens are picked by the same `Branch` of an engine's request, so that runs with the
same options can be compared token by token.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from kvcache.cli import units
from kvcache.decoder.weights import Weights
from kvcache.engine import Completion, Engine
from kvcache.engine.model import longest_text, warn_of_what_is_not_done
from kvcache.engine.options import options_of
from kvcache.engine.request import Branch, Request
from kvcache.errors import InvalidValueError, NotSupportedError
from kvcache.hf import cache_for, use_attention
from kvcache.hf.attention import attention_is_exchangeable
from kvcache.hf.cache import ModelCache
from kvcache.hf.guard import parameters_of_forward
from kvcache.hf.versions import CACHE_ARGUMENT
from kvcache.memory import free_memory
from kvcache.storage import CacheSpec
from kvcache.storage.codecs import Storage

OnText = Callable[[str], None]  # gets each piece of the text as it comes


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

    completion: Completion
    cache: CacheAccount | None  # None: every step computed the whole sequence again
    runs_through: str = "transformers' forward"  # what ran the model, as `Engine.runs_through` says it

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.completion.usage.prompt_tokens

    @property
    def token_ids(self) -> list[int]:
        """The new tokens."""
        return self.completion.token_ids

    @property
    def num_processed(self) -> int:
        """Tokens that the model ran over with a cache: the last one never, and those proposed for nothing too."""
        proposed = self.completion.speculation
        num_rejected = 0 if proposed is None else proposed.num_proposed - proposed.num_accepted
        return self.prompt_tokens + len(self.token_ids) - 1 + num_rejected

    @property
    def total_seconds(self) -> float:
        """Seconds from the prompt to the last token."""
        return self.completion.timings.total

    @property
    def first_token_seconds(self) -> float:
        """Seconds from the prompt to the first token: prefill and the first sample."""
        return self.completion.timings.first_token

    @property
    def decode_seconds(self) -> float:
        """Seconds from the first token to the last."""
        return self.total_seconds - self.first_token_seconds

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens over the time to the first token."""
        return self.prompt_tokens / self.first_token_seconds

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens after the first over the time they took; None where there are none."""
        seconds = self.completion.timings.per_token
        return None if seconds is None else 1 / seconds


class Text:
    """A prompt, the model that continues it, and how.

    Args:
        model, tokenizer: of transformers.
        prompt_ids: at least one, and with the new tokens no more than the model's context.
        options: as of `Engine.generate`, `max_new_tokens` among them.
    """

    def __init__(self, model: Any, tokenizer: Any, prompt_ids: list[int], options: dict[str, Any]) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._prompt_ids = prompt_ids
        self._options = options | {"num_return_sequences": 1}
        self._max_tokens = len(prompt_ids) + options["max_new_tokens"] - 1  # the last one is sampled and never stored

    def check_memory(self, storage: Storage | None) -> None:
        """Check that what it stores can be had.

        Raises:
            InvalidValueError: it takes more than is free.
        """
        try:
            spec = CacheSpec.from_config(self._model.config)
        except InvalidValueError:  # layers of a kind that cannot be counted
            return
        nbytes = spec.kept_nbytes(self._max_tokens, storage or self._model.dtype)
        if (free := free_memory(self._model.device)) is not None and nbytes > free:
            raise InvalidValueError(
                f"keys and values of {self._max_tokens:,} tokens, new ones included, take {units.size(nbytes)}, and "
                f"{units.size(free)} are free; ask for fewer new tokens, or with --storage for fewer bits"
            )

    def through_engine(
        self,
        storage: Storage | None,
        weights: Weights | None,
        on_text: OnText,
        on_ready: Callable[[], object] = lambda: None,
    ) -> Run:
        """Continue it through an engine with room for it alone.

        Args:
            storage, weights: as of `Engine`.
            on_text: gets the text.
            on_ready: is called when the engine is made.

        Raises:
            NotSupportedError: the model cannot run so, or not for so long a text. No text has come.
        """
        longest = longest_text(self._model)
        if longest is not None and longest < self._max_tokens:
            raise NotSupportedError(f"its rotary positions change beyond {longest:,} tokens")
        with Engine(
            self._model,
            self._tokenizer,
            num_tokens=self._max_tokens,
            storage=storage,
            max_running=1,
            weights=weights,
        ) as engine:
            on_ready()
            job = engine.submit(self._prompt_ids, **self._options)
            for piece in job:
                on_text(piece)
            (completion,) = job.result()
            return Run(completion, self._account_of(engine, completion), engine.runs_through)

    def through_transformers(self, storage: Storage | None, on_text: OnText) -> Run:
        """Continue it through the model's own forward and a cache of `cache_for`; `storage` as there."""
        cache = cache_for(self._model, self._max_tokens, storage=storage)
        assert isinstance(cache, ModelCache)  # as the model has no encoder

        def next_logits(ids: list[int]) -> torch.Tensor:
            return self._logits(ids[cache.get_seq_length() :], use_cache=True, **{CACHE_ARGUMENT: cache})

        with use_attention(self._model) if attention_is_exchangeable(self._model) else nullcontext():
            completion = self._completion(next_logits, on_text)
        rows = cache.layers[0].rows
        assert rows is not None  # the prompt has run
        return Run(
            completion,
            CacheAccount(cache.get_seq_length(), cache.nbytes, cache.stored_nbytes, cache.token_nbytes, rows.storage),
        )

    def without_cache(self, on_text: OnText, on_token: Callable[[], object] = lambda: None) -> Run:
        """Continue it through the model's own forward, over the whole text for every token."""

        def next_logits(ids: list[int]) -> torch.Tensor:
            logits = self._logits(ids, use_cache=False)
            on_token()
            return logits

        return Run(self._completion(next_logits, on_text), None)

    def warm_up(self) -> None:
        """Run the prompt's first tokens through the model's forward, so that no timed run pays for what is done once.

        An engine does so by itself, when it is made.
        """
        with torch.inference_mode():
            self._logits(self._prompt_ids[:64], use_cache=False)

    @torch.inference_mode()
    def _completion(self, next_logits: Callable[[list[int]], torch.Tensor], on_text: OnText) -> Completion:
        warn_of_what_is_not_done(self._model.generation_config)
        one_by_one = self._options | {"prompt_lookup_num_tokens": 0}
        options = options_of(self._model.generation_config, one_by_one)
        request = Request(self._prompt_ids, options, self._tokenizer, on_text=lambda _, piece: on_text(piece))
        request.started = request.made
        branch = Branch(request, 0, self._model.device)
        while branch.completion is None:
            branch.pick(next_logits(branch.tokens))
        return branch.completion

    def _logits(self, ids: list[int], **arguments: Any) -> torch.Tensor:
        if "logits_to_keep" in parameters_of_forward(type(self._model).forward):
            arguments["logits_to_keep"] = 1
        output = self._model(torch.tensor([ids], device=self._model.device), return_dict=True, **arguments)
        logits: torch.Tensor = output.logits[0, -1]
        return logits

    def _account_of(self, engine: Engine, completion: Completion) -> CacheAccount:
        tokens = len(self._prompt_ids) + len(completion.token_ids) - 1
        spec = CacheSpec.from_config(self._model.config)
        stored = spec.kept_nbytes(tokens, engine.storage)
        return CacheAccount(tokens, engine.nbytes, stored, spec.token_nbytes(engine.storage), engine.storage)
