"""The engine: many prompts at once over one model and one pool."""

import os
import weakref
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any, Self

import torch
from transformers import PreTrainedModel

from kvcache.checks import check_int
from kvcache.engine.completion import Completion
from kvcache.engine.job import Job, Pieces
from kvcache.engine.options import options_of
from kvcache.engine.request import Request
from kvcache.engine.scheduler import Scheduler
from kvcache.engine.worker import Worker
from kvcache.errors import InvalidTypeError, InvalidValueError
from kvcache.hf import forward_step, load_model, use_attention
from kvcache.hf.cache import unchanged_positions
from kvcache.hf.guard import check_decoder_only
from kvcache.hf.prompt import Prompt, check_known_ids, fitting_new_tokens, prompt_ids
from kvcache.memory import free_memory, parse_size
from kvcache.prefix import PrefixCache, PrefixStatistics
from kvcache.prefix.keys import encoded
from kvcache.storage import BlockPool, CacheSpec
from kvcache.storage.codecs import StorageLike
from kvcache.storage.model_config import decoder_config

SHARE_OF_FREE_MEMORY = 4  # one part of so many, where it is not said
WHOLE_TEXTS = 16  # and no more than so many texts of the model's whole context take


class Engine:
    """Runs prompts, in any number and order, together, and each as if it were alone.

    The new tokens of all texts run in one step after another (continuous batching), prompts in parts beside them. What
    texts begin with in common is computed once (`PrefixCache`). Where memory is short, the newest texts wait.

    One engine may be used from many threads, and from asyncio; its model belongs to it meanwhile.

    Args:
        model: a transformers decoder that `kvcache.hf.forward_step` can run.
        tokenizer: its tokenizer.
        memory: for keys and values, in bytes or as in "2GiB"; default: a quarter of what is free, and no more than 16
            texts of the model's whole context take.
        storage: how rows are kept, as in `kvcache.KVCache`; default: the model's dtype.
        block_size: tokens of a block, >= 1.
        max_step_tokens: tokens that run in one step, those of texts whose prompt has run first; at least one of a
            prompt; >= 1.
        max_running: texts that run at once at most, >= 1.

    Attributes:
        model, tokenizer: as given.
        num_tokens: tokens that the memory holds.

    Raises:
        InvalidTypeError, InvalidValueError: the model is none, or of a kind that cannot run so; the memory does not
            hold a block; or another argument is not what is described here.

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
        storage: StorageLike | None = None,
        block_size: int = 64,
        max_step_tokens: int = 512,
        max_running: int = 64,
    ) -> None:
        check_decoder_only(model)
        if not (callable(tokenizer) and hasattr(tokenizer, "decode")):
            raise InvalidTypeError(f"tokenizer is a {type(tokenizer).__name__}; expected a transformers tokenizer")
        block_size = check_int("block_size", block_size, minimum=1)
        max_step_tokens = check_int("max_step_tokens", max_step_tokens, minimum=1)
        max_running = check_int("max_running", max_running, minimum=1)
        use_attention(model).undo()  # which says if that cannot be
        self.model: Any = model
        self.tokenizer = tokenizer
        spec = CacheSpec.from_config(model.config)
        kept = model.dtype if storage is None else storage
        num_blocks = _num_blocks(spec, memory, block_size, kept, model)
        pool = BlockPool(spec, num_blocks, block_size, kept, model.device)
        self._prefixes = PrefixCache(pool, model)
        scheduler = Scheduler(self._prefixes, partial(forward_step, model), max_step_tokens, max_running)
        self._worker = Worker(scheduler, partial(use_attention, model))
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
        """Tokens whose keys and values the memory holds."""
        pool = self._prefixes.pool
        return min(pool.num_blocks.values()) * pool.block_size

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
        pool = self._prefixes.pool
        size = f"{self.num_tokens:,} tokens, {pool.nbytes / 1e6:,.1f} MB"
        return f"Engine({type(self.model).__name__}, room for {size} in {pool.storage})"

    def _request(self, prompt: Prompt, namespace: Any, options: dict[str, Any]) -> Request:
        checked = options_of(self.model.generation_config, options)
        own = encoded("namespace", namespace)  # as it is now, whatever the caller does with it later
        ids = prompt_ids(self.tokenizer, prompt)
        check_known_ids(self.model, ids)
        return Request(ids, checked.limited(_fitting_new_tokens(self.model, len(ids))), self.tokenizer, own)

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


def _fitting_new_tokens(model: Any, num_tokens: int) -> int:
    """Return how many tokens the context, and positions that do not depend on the length, leave room for."""
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


def _num_blocks(
    spec: CacheSpec, memory: int | str | None, block_size: int, storage: StorageLike, model: PreTrainedModel
) -> int:
    """Return how many blocks of each kind the memory holds."""
    block_nbytes = spec.nbytes(1, block_size, storage)
    if memory is None:
        context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 8192
        most = WHOLE_TEXTS * -(-context // block_size) * block_nbytes
        nbytes = min((free_memory(model.device) or most) // SHARE_OF_FREE_MEMORY, most)
    elif isinstance(memory, str):
        nbytes = parse_size("memory", memory)
    else:
        nbytes = check_int("memory", memory, minimum=1)
    if (free := free_memory(model.device)) is not None and nbytes > free:
        raise InvalidValueError(f"memory is {nbytes:,} bytes, and {free:,} are free; expected at most that")
    if nbytes < block_nbytes:
        raise InvalidValueError(
            f"memory is {nbytes:,} bytes; a block of {block_size} tokens takes {block_nbytes:,}, expected at least that"
        )
    return nbytes // block_nbytes
