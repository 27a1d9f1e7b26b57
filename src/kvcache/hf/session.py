"""Several turns, and several continuations, over one growing cache: of each text only what is new is computed.

    cached     system prompt . question . answer
    turn 2     system prompt . question . answer . question 2       computes question 2
    turn 3     system prompt . another question                     goes back, and computes another question

Each call works on a fork of a state, and becomes the next state when it has succeeded. So a call that fails has changed
nothing, the states before can be gone back to, and a session and its fork may start from one and the same.
"""

import threading
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from transformers import PreTrainedModel

from kvcache.checks import check_int
from kvcache.errors import InvalidTypeError, InvalidValueError
from kvcache.hf.attention import attention_is_exchangeable, use_attention
from kvcache.hf.cache import ModelCache, cache_for
from kvcache.hf.detokenize import Detokenizer
from kvcache.hf.guard import check_decoder_only
from kvcache.hf.prompt import Prompt
from kvcache.hf.stepwise import stepwise
from kvcache.hf.turn import Request, Turn, Usage, tokens_of
from kvcache.hf.versions import CACHE_ARGUMENT
from kvcache.storage.codecs import StorageLike

UNDO_DEPTH = 4  # earlier states that are kept; where forks are copies, one


@dataclass(frozen=True)
class Completion:
    """What `Session.generate` returns."""

    text: str
    token_ids: list[int]  # the new ones
    finish_reason: Literal["stop", "length"]  # "length": as many tokens as were allowed, and no end token last
    usage: Usage


class Session:
    """One text that grows turn by turn: give the whole text each time, and only what is new of it is computed.

    What is cached is matched by token ids. Where a new text parts from it, the session goes back to the longest common
    beginning; a prompt's last token is always computed, as its logits are needed. Each call computes what
    `model.generate` without a cache would, to rounding (and nearly that with a quantised storage).

    While a call runs, the model attends through `kvcache.attend` (see `use_attention`), and the cache is in blocks that
    earlier states and forks share. Models that cannot attend so keep their attention, and forks are copies; to tell,
    one token is run when the session is made. A sliding window that has let go of what an earlier place in the text
    needs cannot go back there: then the nearest earlier state that can serve does, or all is computed.

    A session, its forks and its streams are used from one thread at a time.

    Args:
        model: a transformers decoder that can generate.
        tokenizer: its tokenizer.
        storage: how rows are kept, as in `kvcache.KVCache`; default: as they come.
        block_size: tokens of a block, >= 1.

    Raises:
        InvalidTypeError, InvalidValueError: the model is none, or an encoder-decoder, or its layers are of a kind that
            `cache_for` does not support; or another argument is not what is described here.

    Example::

        session = kvcache.hf.Session(model, tokenizer)
        system = {"role": "system", "content": "Answer in one word."}
        for question in ("The capital of France?", "The capital of Italy?"):
            print(session.generate([system, {"role": "user", "content": question}], max_new_tokens=8).text)
            print(session.usage.cached_tokens)
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, *, storage: StorageLike | None = None, block_size: int = 64
    ) -> None:
        check_decoder_only(model)
        if not (callable(tokenizer) and hasattr(tokenizer, "decode")):
            raise InvalidTypeError(f"tokenizer is a {type(tokenizer).__name__}; expected a transformers tokenizer")
        cache = cache_for(model, storage=storage, block_size=check_int("block_size", block_size, minimum=1))
        assert isinstance(cache, ModelCache)
        self._is_fused = _attention_reads_store(model, cache.fork())
        if not self._is_fused:
            cache = cache_for(model, storage=storage)
            assert isinstance(cache, ModelCache)
        self.model: Any = model
        self.tokenizer = tokenizer
        self._empty = cache
        self._state = cache  # states are never written
        self._earlier: deque[ModelCache] = deque(maxlen=UNDO_DEPTH if self._is_fused else 1)
        self._usage: Usage | None = None
        self._in_use = threading.Lock()

    @property
    def tokens(self) -> list[int]:
        """The ids of the tokens whose keys and values are cached; the last one sampled is never among them."""
        return tokens_of(self._state)

    @property
    def usage(self) -> Usage | None:
        """What the last call took, None before the first."""
        return self._usage

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that hold its states, the earlier ones included; what forks share counts in each."""
        buffers = {
            buffer.data_ptr(): buffer.nbytes
            for state in (self._state, *self._earlier)
            for layer in state.layers
            if layer.rows is not None
            for buffer in (layer.rows.k_cache, layer.rows.v_cache)
        }
        return sum(buffers.values())

    def generate(self, prompt: Prompt, **options: Any) -> Completion:
        """Continue a text.

        Args:
            prompt: the whole text: a str, taken as it is; token ids, a list or an integer tensor (T,); or a chat, a
                list of messages with a "role" and a "content", which goes through the tokenizer's chat template.
            options: of transformers' `GenerationConfig`, such as `max_new_tokens`, `do_sample` or `temperature`.

        Raises:
            InvalidTypeError, InvalidValueError: the prompt is none of these, or empty, or has ids that the model does
                not know; the tokenizer has no chat template; an option asks for several texts, or is one that the
                session sets; the session is in use. And what `model.generate` raises. Nothing has changed then.
        """
        request = Request(self.model, self.tokenizer, prompt, options)
        with self._turn(request) as turn:
            turn.new_ids = turn.run()
            detokenizer = Detokenizer(self.tokenizer)
            text = detokenizer.push(turn.new_ids) + detokenizer.finish()
            usage = self._keep(turn)
        return Completion(text, turn.new_ids, turn.finish_reason, usage)

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[str]:
        """Yield the text that `generate` would return, in pieces as they come, never a part of a character.

        Each step is computed when the next piece is asked for. Closing the iterator early ends the generation, and what
        it has computed stays cached. Until it is at its end or closed, the session cannot be used for anything else.

        Takes and raises what `generate` does: what can be told from the arguments at once, the rest while iterating.
        """
        return self._pieces(Request(self.model, self.tokenizer, prompt, options))

    def fork(self) -> Self:
        """Return another session that goes on from the same cached tokens, whose blocks both share.

        Windows are copied, and all rows of models whose attention does not read blocks. The fork cannot undo what was
        before, and has no usage yet.

        Raises:
            InvalidValueError: the session is in use.
        """
        with self._alone():
            other = object.__new__(type(self))
            other.__dict__.update(self.__dict__)
            other._earlier = deque(maxlen=self._earlier.maxlen)
            other._usage = None
            other._in_use = threading.Lock()
        return other

    def undo(self) -> None:
        """Take back the last `generate` or `stream`: the cache is again what it was before it; `usage` stays.

        The last four calls can be taken back (of models whose attention does not read blocks, the last one), and the
        blocks that only they need are held as long.

        Raises:
            InvalidValueError: there is none to take back, or the session is in use.
        """
        with self._alone():
            if not self._earlier:
                raise InvalidValueError(
                    f"nothing to undo; of its calls at most the last {self._earlier.maxlen} can be taken back"
                )
            self._state = self._earlier.pop()

    def __copy__(self) -> Self:
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.fork()  # independent; the model is the same

    def __repr__(self) -> str:
        num_tokens = self._state.get_seq_length()
        return f"{type(self).__name__}({type(self.model).__name__}, {num_tokens} tokens, {self.nbytes} bytes)"

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._in_use.acquire(blocking=False):
            raise InvalidValueError("the session is in use; first let its stream come to its end, or close() it")
        try:
            yield
        finally:
            self._in_use.release()

    @contextmanager
    def _turn(self, request: Request) -> Iterator[Turn]:
        with self._alone(), use_attention(self.model) if self._is_fused else nullcontext():
            # With nothing in common the empty one is taken, which has no rows to fork; else the newest that can serve.
            yield Turn(request, [self._empty, self._state, *reversed(self._earlier)])

    def _keep(self, turn: Turn) -> Usage:
        """Let what a turn has computed be the session's state."""
        self._usage = turn.end()
        self._earlier.append(self._state)
        self._state = turn.cache
        return self._usage

    def _pieces(self, request: Request) -> Iterator[str]:
        detokenizer = Detokenizer(self.tokenizer)
        with self._turn(request) as turn:
            try:
                with closing(stepwise(turn.run, self.model.device)) as steps:
                    for new_ids in steps:
                        turn.new_ids += new_ids
                        if piece := detokenizer.push(new_ids):
                            yield piece
                    if piece := detokenizer.finish():
                        yield piece
            except GeneratorExit:  # closed early: what has been computed is right
                self._keep(turn)
                raise
            self._keep(turn)


def _attention_reads_store(model: PreTrainedModel, cache: ModelCache) -> bool:
    """Run one token with an empty cache, which takes it, and see whether attention reads the store in every layer."""
    if not attention_is_exchangeable(model):
        return False
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with use_attention(model), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a layer that touches its keys warns
        model(token, use_cache=True, **{CACHE_ARGUMENT: cache})
    return not any(layer.is_touched for layer in cache.layers)
