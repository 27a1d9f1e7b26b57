"""One side of benchmarks/engine.py in a process of its own: `python -m benchmarks.engine_case job.json result.json`.

The job names the side, the model and its dtype, and has rounds of prompts: those of a round are asked for at once, the
next round when all have their new tokens. The result has of each round the seconds it took, every prompt's new tokens
and, where they can be told, the seconds from its beginning to the first token and of each later one, and how many
tokens of the prompts were found.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from kvcache import CacheSpec, Engine
from kvcache.hf import load_model

from .generate_case import Clock, peak_memory, reset_peak_memory

BATCH = 8
PAGE_SIZE = 64  # tokens; with transformers' own 256 less of a prefix is shared

Prompts = list[list[int]]
Result = dict[str, Any]
Run = Callable[[Prompts, int], Result]


@contextmanager
def kvcache_engine(model: Any, tokenizer: Any, job: dict[str, Any]) -> Iterator[Run]:
    with Engine(model, tokenizer, memory=job["memory"]) as engine:

        def run(prompts: Prompts, new_tokens: int) -> Result:
            options: dict[str, Any] = {"max_new_tokens": new_tokens, "eos_token_id": [], "do_sample": False}
            answers = engine.generate_many(prompts, progress=False, **options)
            return {
                "token_ids": [answer.token_ids for answer in answers],
                "first_token_seconds": [answer.timings.first_token for answer in answers],
                "step_seconds": [answer.timings.per_token for answer in answers],
                "cached_tokens": sum(answer.usage.cached_tokens for answer in answers),
            }

        yield run


def batching_config(model: Any, job: dict[str, Any]) -> ContinuousBatchingConfig:
    """Return the settings that were the fastest here.

    On a CPU attention is scaled_dot_product_attention over all queries and all keys of a step, with a mask that leaves
    a query its own text's. A step costs the product of the two, so the long texts of a shared prefix are faster a few
    at a time, and prompts in pieces rather than 8,192 tokens a step, its default.
    """
    longest = max(len(prompt) for prompts in job["rounds"] for prompt in prompts)
    return ContinuousBatchingConfig(
        page_size=PAGE_SIZE,
        num_blocks=job["memory"] // CacheSpec.from_config(model.config).nbytes(1, PAGE_SIZE, model.dtype),
        max_batch_tokens=512,
        max_requests_per_batch=8 if longest > 512 else 32,
    )


@contextmanager
def count_found() -> Iterator[list[int]]:
    """Note the length of each prefix that transformers finds; it tells nobody."""
    found: list[int] = []
    search = PagedAttentionCache.search_prefix_match

    def counting(cache: PagedAttentionCache, request_id: str, prompt_ids: list[int]) -> int:
        found.append(search(cache, request_id, prompt_ids))
        return found[-1]

    with mock.patch.object(PagedAttentionCache, "search_prefix_match", counting):
        yield found


@contextmanager
def continuous_batching(model: Any, tokenizer: Any, job: dict[str, Any]) -> Iterator[Run]:
    """As `generate_batch` does it, with a manager that stays, so that its cache is not made while it is timed."""
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1),  # type: ignore[no-untyped-call]
        continuous_batching_config=batching_config(model, job),
    )
    with count_found() as found:

        def run(prompts: Prompts, new_tokens: int) -> Result:
            found.clear()
            start = time.perf_counter()
            names = manager.add_requests(prompts, max_new_tokens=new_tokens, record_timestamps=True)
            outputs: dict[str, Any] = {}
            while len(outputs) < len(names):
                output = manager.get_result(timeout=1)
                if output is None and not manager.is_running():
                    raise RuntimeError("the manager of transformers' continuous batching has stopped")
                if output is not None:
                    outputs[output.request_id] = output
            times = [outputs[name].timestamps for name in names]
            return {
                "token_ids": [outputs[name].generated_tokens for name in names],
                "first_token_seconds": [of_one[0] - start for of_one in times],
                "step_seconds": [(of_one[-1] - of_one[0]) / (new_tokens - 1) for of_one in times],
                "cached_tokens": sum(found),
            }

        with torch.inference_mode():  # its thread takes this over
            manager.start()
        try:
            yield run
        finally:
            manager.stop()


@contextmanager
def batches(model: Any, tokenizer: Any, job: dict[str, Any], *, size: int) -> Iterator[Run]:
    def run(prompts: Prompts, new_tokens: int) -> Result:
        result: Result = {"token_ids": [], "first_token_seconds": []}
        start = time.perf_counter()
        for first in range(0, len(prompts), size):
            batch = prompts[first : first + size]
            longest = max(map(len, batch))
            padding = [longest - len(prompt) for prompt in batch]
            clock = Clock()
            output = model.generate(
                torch.tensor([[0] * pads + prompt for pads, prompt in zip(padding, batch, strict=True)]),
                attention_mask=torch.tensor([[0] * pads + [1] * (longest - pads) for pads in padding]),
                max_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
                streamer=clock,
            )
            result["token_ids"] += output[:, longest:].tolist()
            result["first_token_seconds"] += [clock.times[1] - start] * len(batch)
        return result

    model.generation_config.eos_token_id = None
    yield run


SIDES: dict[str, Callable[[Any, Any, dict[str, Any]], AbstractContextManager[Run]]] = {
    "kvcache": kvcache_engine,
    "transformers, continuous batching": continuous_batching,
    "transformers, padded batches": partial(batches, size=BATCH),
    "transformers, one by one": partial(batches, size=1),
}


def measure(job: dict[str, Any]) -> dict[str, Any]:
    model, tokenizer = load_model(job["model"], dtype=job["dtype"])
    with SIDES[job["side"]](model, tokenizer, job) as run:
        run([job["warm_up"]], 4)
        loaded, rounds = reset_peak_memory(), []
        for prompts in job["rounds"]:
            start = time.perf_counter()
            result = run(prompts, job["new_tokens"])
            rounds.append({"seconds": time.perf_counter() - start, **result})
    return {"rounds": rounds, "loaded_nbytes": loaded, "peak_nbytes": peak_memory()}


if __name__ == "__main__":
    job_file, result_file = map(Path, sys.argv[1:])
    result_file.write_text(json.dumps(measure(json.loads(job_file.read_text()))))
