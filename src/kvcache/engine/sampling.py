"""The next token of one text: transformers' logits processors over one row of logits, and a draw of its own."""

import hashlib
import secrets
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvcache.engine.options import Options
from kvcache.errors import InvalidValueError


@dataclass(frozen=True)
class TokenLogprobs:
    """How likely a token was, by the model's own logits.

    Attributes:
        logprob: the natural logarithm of its probability.
        top: the likeliest tokens and theirs, the likeliest first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


class Sampler:
    """Picks the tokens of one text.

    Args:
        options: of its request.
        index: of the text among those of the request.
        prompt_length: tokens of the prompt.
        device: of the logits.
    """

    def __init__(self, options: Options, index: int, prompt_length: int, device: torch.device) -> None:
        self._options = options
        self._processors = _processors(options, prompt_length, device)
        self._generator: torch.Generator | None = None
        if options.do_sample:
            seed = secrets.randbits(63) if options.seed is None else _seed_of(options.seed, index)
            self._generator = torch.Generator(device).manual_seed(seed)

    @property
    def takes_the_likeliest(self) -> bool:
        """Whether the token is the likeliest by the model's own logits, and nothing else is asked for."""
        return not (self._processors or self._options.do_sample or self._options.logprobs is not None)

    def pick(self, logits: torch.Tensor, ids: list[int]) -> tuple[int, TokenLogprobs | None]:
        """Return the next token of a text, and how likely it was if that is asked for.

        Args:
            logits: (vocabulary,).
            ids: all tokens so far.
        """
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).unsqueeze(0)
        raw = scores
        if self._processors:
            input_ids: Any = torch.tensor([ids], device=logits.device)
            cloned: Any = scores.clone()
            scores = self._processors(input_ids, cloned)
        if self._generator is None:
            token = int(scores.argmax())
        else:
            if not scores.amax().isfinite():  # drawing from these would end a CUDA context, for everybody
                raise InvalidValueError(
                    "the model's logits are infinite, or temperature and repetition_penalty make them so; expected "
                    "values nearer to 1"
                )
            token = int(torch.multinomial(scores.softmax(dim=-1)[0], 1, generator=self._generator))
        return token, self._logprobs(raw[0], token)

    def _logprobs(self, logits: torch.Tensor, token: int) -> TokenLogprobs | None:
        if self._options.logprobs is None:
            return None
        logprobs = logits.log_softmax(dim=-1)
        values, tokens = logprobs.topk(min(self._options.logprobs, len(logprobs)))
        return TokenLogprobs(float(logprobs[token]), tuple(zip(tokens.tolist(), values.tolist(), strict=True)))


def _seed_of(seed: int, index: int) -> int:
    """Return the seed of one of a request's texts; those of neighbouring seeds have nothing in common."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {index}".encode(), digest_size=8).digest(), "big")


def _processors(options: Options, prompt_length: int, device: torch.device) -> LogitsProcessorList:
    """Return what transformers' `generate` would use, in its order."""
    processors = LogitsProcessorList()
    if options.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(options.repetition_penalty))
    if options.min_new_tokens and options.eos_token_id:
        ends = list(options.eos_token_id)
        processors.append(MinNewTokensLengthLogitsProcessor(prompt_length, options.min_new_tokens, ends, str(device)))
    if not options.do_sample:
        return processors
    if options.temperature != 1.0:
        processors.append(TemperatureLogitsWarper(options.temperature))
    if options.top_k:
        processors.append(TopKLogitsWarper(options.top_k))
    if options.top_p < 1.0:
        processors.append(TopPLogitsWarper(options.top_p))
    if options.min_p:
        processors.append(MinPLogitsWarper(options.min_p))
    return processors
