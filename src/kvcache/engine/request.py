"""A request under way: its prompt, what it asks for, and the texts that are generated for it."""

import time
from collections.abc import Callable
from typing import Any

import torch

from kvcache.engine.completion import Completion, FinishReason, Outcome, Speculation, Timings
from kvcache.engine.lookup import PromptLookup
from kvcache.engine.options import Options
from kvcache.engine.sampling import Sampler, TokenLogprobs
from kvcache.engine.stops import StopStrings
from kvcache.hf.detokenize import Detokenizer
from kvcache.hf.turn import Usage
from kvcache.storage.sequence import Sequence


class Request:
    """What one caller asked for.

    Args:
        ids: of the prompt.
        options: how it is continued.
        tokenizer: for its text.
        namespace: apart from which nothing of its prefix is shared.
        on_text: called with the index of a text and each piece of it, as they come.
        on_end: called once, with all texts or with the error that ended them.
    """

    def __init__(
        self,
        ids: list[int],
        options: Options,
        tokenizer: Any,
        namespace: Any = None,
        on_text: Callable[[int, str], None] | None = None,
        on_end: Callable[[Outcome], None] | None = None,
    ) -> None:
        self.ids = ids
        self.options = options
        self.tokenizer = tokenizer
        self.namespace = namespace
        self.on_text = on_text
        self.on_end = on_end
        self.made = time.perf_counter()
        self.started: float | None = None  # when its prompt began to run
        self.num_cached: int | None = None
        self.outcome: Outcome | None = None
        self.branches: list[Branch] = []

    @property
    def num_tokens(self) -> int:
        """Tokens that are stored for one of its texts at most; the last one sampled never is."""
        return len(self.ids) + self.options.max_new_tokens - 1

    def note_end(self) -> None:
        """Say so once all texts are done."""
        if self.outcome is None and all(branch.completion is not None for branch in self.branches):
            self.end([branch.completion for branch in self.branches if branch.completion is not None])

    def end(self, outcome: Outcome) -> None:
        """End it with its texts, or with an error."""
        self.outcome = outcome
        if self.on_end is not None:
            self.on_end(outcome)


class Branch:
    """One text of a request: its tokens so far, and the sequence that holds what of them has run, if it has one."""

    def __init__(self, request: Request, index: int, device: torch.device) -> None:
        self.request = request
        self.index = index
        self.tokens = request.ids[:]
        self.sequence: Sequence | None = None
        self.completion: Completion | None = None
        options = request.options
        num_proposed = options.prompt_lookup_num_tokens
        self.lookup = PromptLookup(num_proposed, options.max_matching_ngram_size) if num_proposed else None
        self._sampler = Sampler(request.options, index, len(request.ids), device)
        self._device = device
        self._detokenizer = Detokenizer(request.tokenizer)
        self._stops = StopStrings(request.options.stop_strings)
        self._text: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._first_token = self._last_token = 0.0

    @property
    def new_ids(self) -> list[int]:
        """The tokens that were generated."""
        return self.tokens[len(self.request.ids) :]

    @property
    def waiting(self) -> list[int]:
        """The tokens that have not run yet: of the prompt or, after a preemption, of the whole text; else the last."""
        return self.tokens[self.sequence.seq_len if self.sequence is not None else 0 :]

    @property
    def shares_open_block(self) -> bool:
        """Whether it would write a block that others may hold."""
        return self.sequence is not None and self.sequence.seq_len % self.sequence.pool.block_size > 0

    @property
    def takes_the_likeliest(self) -> bool:
        """Whether the next token is the likeliest by the model's own logits."""
        return self._sampler.takes_the_likeliest

    def missing_siblings(self) -> "list[Branch]":
        """Give the request its other texts, which begin behind its prompt as this one does, and return those."""
        request = self.request
        indices = range(len(request.branches), request.options.num_return_sequences)
        siblings = [Branch(request, index, self._device) for index in indices]
        request.branches += siblings
        return siblings

    def propose(self, most: int) -> list[int]:
        """Return tokens that may come next, at most so many, of which none would end the text or be its last.

        None before its first token, with which the request's texts part.
        """
        count, options = len(self.tokens) - len(self.request.ids), self.request.options
        most = min(most, options.max_new_tokens - count - 1)
        if self.lookup is None or count == 0 or most < 1:
            return []
        proposed = self.lookup.propose(self.tokens, most)
        ends = (place for place, token in enumerate(proposed) if token in options.eos_token_id)
        return proposed[: next(ends, None)]

    def pick(self, logits: torch.Tensor) -> None:
        """Take the next token from its logits (vocabulary,)."""
        token, logprobs = self._sampler.pick(logits, self.tokens)
        self.take(token, logprobs)

    def take(self, token: int, logprobs: TokenLogprobs | None = None) -> None:
        """Take the next token, and end the text if it is the last."""
        self.tokens.append(token)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        self._last_token = time.perf_counter() - self.request.made
        count, options = len(self.tokens) - len(self.request.ids), self.request.options
        if count == 1:
            self._first_token = self._last_token
        is_end = token in options.eos_token_id
        self._push(self._detokenizer.push([token]))
        if is_end or count == options.max_new_tokens:
            self.end("stop" if is_end else "length")
        elif self._stops.is_hit:
            self.end("stop")

    def end(self, reason: FinishReason) -> None:
        """End the text."""
        self._push(self._detokenizer.finish())
        if self._stops.is_hit:
            reason = "stop"
        self._show(self._stops.finish())
        request, lookup, count = self.request, self.lookup, len(self.tokens) - len(self.request.ids)
        cached = request.num_cached or 0
        timings = Timings(
            queue=(request.started or time.perf_counter()) - request.made,
            first_token=self._first_token,
            total=self._last_token,
            per_token=(self._last_token - self._first_token) / (count - 1) if count > 1 else None,
        )
        self.completion = Completion(
            text="".join(self._text),
            token_ids=self.new_ids,
            finish_reason=reason,
            usage=Usage(len(request.ids), cached, len(request.ids) - cached, count),
            timings=timings,
            logprobs=None if request.options.logprobs is None else self._logprobs,
            speculation=None if lookup is None else Speculation(lookup.num_proposed, lookup.num_accepted),
        )

    def _push(self, text: str) -> None:
        may_stop = len(self.tokens) - len(self.request.ids) >= self.request.options.min_new_tokens
        self._show(self._stops.push(text, may_stop))

    def _show(self, piece: str) -> None:
        if piece:
            self._text.append(piece)
            if self.request.on_text is not None:
                self.request.on_text(self.index, piece)
