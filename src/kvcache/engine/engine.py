"""The engine: many prompts at once over one model and one pool."""

import os
import weakref
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Self

import torch
from transformers import PreTrainedModel

from kvcache.checks import check_int
from kvcache.decoder.weights import Weights
from kvcache.engine.completion import Completion
from kvcache.engine.job import Job, Pieces
from kvcache.engine.model import fitting_in_engine, longest_text, warn_of_what_is_not_done
from kvcache.engine.options import options_of
from kvcache.engine.request import Request
from kvcache.engine.room import Room
from kvcache.engine.runner import Runner
from kvcache.engine.scheduler import Scheduler
from kvcache.engine.worker import Worker
from kvcache.errors import InvalidTypeError, InvalidValueError
from kvcache.hf import load_model
from kvcache.hf.guard import check_decoder_only
from kvcache.hf.prompt import Prompt, check_known_ids, prompt_ids
from kvcache.prefix import PrefixCache, PrefixStatistics
from kvcache.prefix.keys import encoded
from kvcache.storage import BlockPool
from kvcache.storage.codecs import StorageLike, check_storage


class Engine:
    """Runs prompts, in any number and order, together, and each as if it were alone.

    The new tokens of all texts run in one step after another (continuous batching), prompts in parts beside them. What
    texts begin with in common is computed once (`PrefixCache`). Where memory is short, the newest texts wait.

    One engine may be used from many threads, and from asyncio; its model belongs to it meanwhile.

    Args:
        model: a transformers decoder that `kvcache.hf.forward_step` can run. One that `kvcache.hf.NativeDecoder` fits
            runs through that, several times faster on a CPU.
        tokenizer: its tokenizer.
        memory: for keys and values, in bytes or as in "2GiB"; default: a quarter of what is free, and no more than 16
            texts of the model's whole context take.
        num_tokens: memory for so many tokens instead, >= 1, in whole blocks.
        storage: how rows are kept, as in `kvcache.KVCache`; default: the model's dtype.
        block_size: tokens of a block, >= 1.
        max_step_tokens: tokens that run in one step, those of texts whose prompt has run first; at least one of a
            prompt; >= 1.
        max_running: texts that run at once at most, >= 1.
        weights: "int8" for a copy of the model's matrices in int8, as of `kvcache.hf.NativeDecoder`; default: its own.

    Attributes:
        model, tokenizer: as given.
        num_tokens: tokens that the memory holds.

    Raises:
        NotSupportedError: the model cannot run so, and why.
        InvalidTypeError, InvalidValueError: the memory does not hold a block, or is more than is free; or an argument
            is not what is described here.

    Example::

        with kvcache.Engine.from_pretrained("smollm2") as engine:
            print(engine.generate([{"role": "user", "content": "Why is the sky blue?"}], max_new_tokens=64).text)
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        *,
        memory: int | str | None = None,
        num_tokens: int | None = None,
        storage: StorageLike | None = None,
        block_size: int = 64,
        max_step_tokens: int = 512,
        max_running: int = 64,
        weights: Weights | None = None,
    ) -> None:
        check_decoder_only(model)
        if not (callable(tokenizer) and hasattr(tokenizer, "decode")):
            raise InvalidTypeError(f"tokenizer is a {type(tokenizer).__name__}; expected a transformers tokenizer")
        block_size = check_int("block_size", block_size, minimum=1)
        max_step_tokens = check_int("max_step_tokens", max_step_tokens, minimum=1)
        max_running = check_int("max_running", max_running, minimum=1)
        kept = check_storage("storage", model.dtype if storage is None else storage)
        self._runner = Runner(model, weights)
        spec = self._runner.spec
        warn_of_what_is_not_done(model.generation_config)
        self.model: Any = model
        self.tokenizer = tokenizer
        room = Room(spec, block_size, kept, max_step_tokens, max_running)
        held = room.tokens_to_hold(memory, num_tokens, longest_text(model), model.device)
        pool = BlockPool(spec, room.blocks(held), block_size, kept, model.device)
        self._prefixes = PrefixCache(pool, model)
        scheduler = Scheduler(self._prefixes, self._runner.forward, max_step_tokens, max_running)
        self._worker = Worker(scheduler, self._runner.around)
        weakref.finalize(self, self._worker.stop)  # its thread knows the worker, and nobody but callers the engine

    @classmethod
    def from_pretrained(
        cls,
        name: str | os.PathLike[str] = "smollm2",
        *,
        dtype: torch.dtype | str = torch.float32,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> Self:
        """Load a model and its tokenizer as `kvcache.hf.load_model` does, and return an engine with these `options`."""
        return cls(*load_model(name, dtype=dtype, device=device), **options)

    @property
    def num_tokens(self) -> int:
        """Tokens whose keys and values the memory holds; sliding layers may hold fewer, those that windows see."""
        pool = self._prefixes.pool
        return max(pool.num_blocks.values()) * pool.block_size

    @property
    def nbytes(self) -> int:
        """Bytes of that memory."""
        return self._prefixes.pool.nbytes

    @property
    def kept_nbytes(self) -> int:
        """Bytes of the blocks there that hold what prompts can find.

        Raises:
            EngineClosedError: the engine is closed.
        """
        pool, kept = self._prefixes.pool, self.statistics.num_kept
        row_nbytes = {kind: pool.spec.token_nbytes(pool.storage, kind) for kind in kept}
        return sum(kept[kind] * pool.block_size * row_nbytes[kind] for kind in kept)

    @property
    def storage(self) -> str:
        """How rows are kept there."""
        return self._prefixes.pool.storage

    @property
    def runs_through(self) -> str:
        """What runs the model: "kvcache's own decoder", or "transformers' forward: " and why."""
        reason = self._runner.reason
        return str(self._runner) if reason is None else f"{self._runner}: {reason}"

    @property
    def longest_text(self) -> int | None:
        """Tokens that can be stored of a text: the model's context, or where its rotary positions begin to change.

        None without a limit.
        """
        return longest_text(self.model)

    @property
    def statistics(self) -> PrefixStatistics:
        """What of prompts was found, and what is kept.

        Raises:
            EngineClosedError: the engine is closed.
        """
        found: list[PrefixStatistics] = []
        self._worker.call(lambda: found.append(self._prefixes.statistics))
        return found[0]

    def submit(self, prompt: Prompt, *, namespace: Any = None, **options: Any) -> Job:
        """Let a prompt be continued, and return at once.

        Args:
            prompt: text, taken as it is; token ids, a list or an integer tensor (T,); or chat messages, which go
                through the tokenizer's chat template.
            namespace: apart from which nothing of its prefix is shared, as in `PrefixCache.acquire`.
            options: see `kvcache.engine.options.Options`; where one is not given, what the model's
                `generation_config` says. The model's context is a limit too.

        Raises:
            InvalidTypeError, InvalidValueError: the prompt is none of these, empty, or longer than the model's context,
                or holds ids that the model does not know; an option is unknown or out of range; the namespace is no
                plain data.
            EngineClosedError: the engine is closed.
        """
        return self._started(self._request(prompt, namespace, options))

    def generate(self, prompt: Prompt, *, namespace: Any = None, **options: Any) -> Completion | list[Completion]:
        """Continue a prompt and return the text, with `num_return_sequences` above 1 the texts.

        Takes and raises what `submit` does. A prompt that is larger, with its new tokens, than the memory is refused.
        """
        job = self.submit(prompt, namespace=namespace, **options)
        try:
            return _one_or_all(job.result())
        finally:
            job.cancel()

    def stream(self, prompt: Prompt, *, namespace: Any = None, **options: Any) -> Pieces:
        """Yield a text in pieces as they come, never a part of a character; closing the iterator cancels it.

        Takes and raises what `submit` does, and refuses `num_return_sequences` above 1.
        """
        return iter(self._for_one_text(prompt, namespace, options))

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        *,
        return_exceptions: bool = False,
        progress: bool | None = None,
        **options: Any,
    ) -> list[Any]:
        """Continue many prompts and return their texts in order, as `generate` does for each.

        Args:
            prompts: as of `submit`.
            return_exceptions: whether what is wrong with a prompt stands in its place; else the first error is raised,
                once all others are done.
            progress: whether to show a bar; default: on a terminal.
            options: for all of them, and so is a `namespace`; `submit` takes one for each.
        """
        from tqdm.auto import tqdm

        with self._all_submitted(prompts, options) as jobs:
            disable = None if progress is None else not progress
            outcomes = [_outcome(job) for job in tqdm(jobs, disable=disable, unit="prompt")]
        return _raised(outcomes, return_exceptions)

    async def agenerate(
        self, prompt: Prompt, *, namespace: Any = None, **options: Any
    ) -> Completion | list[Completion]:
        """As `generate`, for asyncio."""
        return _one_or_all(await self.submit(prompt, namespace=namespace, **options).wait())

    async def astream(self, prompt: Prompt, *, namespace: Any = None, **options: Any) -> AsyncGenerator[str, None]:
        """As `stream`, for asyncio."""
        async with aclosing(aiter(self._for_one_text(prompt, namespace, options))) as pieces:
            async for piece in pieces:
                yield piece

    async def agenerate_many(
        self, prompts: Sequence[Prompt], *, return_exceptions: bool = False, **options: Any
    ) -> list[Any]:
        """As `generate_many`, for asyncio."""
        outcomes: list[Any] = []
        with self._all_submitted(prompts, options) as jobs:
            for job in jobs:
                try:
                    outcomes.append(job if isinstance(job, Exception) else _one_or_all(await job.wait()))
                except Exception as error:
                    outcomes.append(error)
        return _raised(outcomes, return_exceptions)

    def close(self) -> None:
        """End all requests with an error, and the engine's thread."""
        self._worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        size = f"{self.num_tokens:,} tokens, {self.nbytes / 1e6:,.1f} MB"
        return f"Engine({type(self.model).__name__}, through {self._runner}, room for {size} in {self.storage})"

    def _request(self, prompt: Prompt, namespace: Any, options: dict[str, Any]) -> Request:
        checked = options_of(self.model.generation_config, options)
        own = encoded("namespace", namespace)  # as it is now, whatever the caller does with it later
        ids = prompt_ids(self.tokenizer, prompt)
        check_known_ids(self.model, ids)
        return Request(ids, checked.limited(fitting_in_engine(self.model, len(ids))), self.tokenizer, own)

    def _started(self, request: Request) -> Job:
        job = Job(request, self._cancel)
        self._worker.submit(request)
        return job

    def _for_one_text(self, prompt: Prompt, namespace: Any, options: dict[str, Any]) -> Job:
        request = self._request(prompt, namespace, options)
        if (number := request.options.num_return_sequences) > 1:
            raise InvalidValueError(f"num_return_sequences is {number}; expected 1, as a stream is one text")
        return self._started(request)

    def _cancel(self, request: Request) -> None:
        self._worker.cancel(request)  # through the engine, which so lives as long as somebody has a job of it

    @contextmanager
    def _all_submitted(self, prompts: Sequence[Prompt], options: dict[str, Any]) -> Iterator[list[Job | Exception]]:
        """Submit many prompts, and cancel what is left of them at the end."""
        if isinstance(prompts, str):
            raise InvalidTypeError("prompts is a str; expected a list of prompts")
        jobs: list[Job | Exception] = []
        try:
            for prompt in prompts:
                try:
                    jobs.append(self.submit(prompt, **options))
                except Exception as error:
                    jobs.append(error)
            yield jobs
        finally:
            for job in jobs:
                if isinstance(job, Job):
                    job.cancel()


def _one_or_all(texts: list[Completion]) -> Completion | list[Completion]:
    return texts[0] if len(texts) == 1 else texts


def _outcome(job: Job | Exception) -> Any:
    if isinstance(job, Exception):
        return job
    try:
        return _one_or_all(job.result())
    except Exception as error:
        return error


def _raised(outcomes: list[Any], return_exceptions: bool) -> list[Any]:
    error = next((outcome for outcome in outcomes if isinstance(outcome, Exception)), None)
    if error is not None and not return_exceptions:
        raise error
    return outcomes
