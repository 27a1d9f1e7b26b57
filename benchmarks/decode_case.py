"""One side of benchmarks/decode.py in a process of its own: `python -m benchmarks.decode_case job.json result.json`.

A job names the side, the model, its dtype, and prompts that are all asked for at once, so many `rounds` one after the
other: in the first they are new, in the others a side that keeps prefixes has seen them. A result has of each round
every prompt's new tokens, the seconds from asking to each of them, and how many tokens of the prompts were found.

With `lookup` in it a job is one of speculation: `lookup` is the number of tokens that are guessed from the text so far,
0 for none, and the model's end token ends a text.
"""

import json
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers

import kvcache
from kvcache.engine.scheduler import Scheduler
from kvcache.hf import load_model

from .generate_case import Case, Clock, Setting, System, peak_memory, reset_peak_memory

INT8 = "int8"  # a dtype of the engine's weights only
FEW_STEPS = 1024  # tokens of all prompts together from which transformers' steps take too long for many of them

Job = dict[str, Any]
Result = dict[str, Any]


def new_engine(job: Job) -> kvcache.Engine:
    if job["dtype"] == INT8:
        options: dict[str, Any] = {"dtype": "bfloat16", "weights": INT8}
    else:
        options = {"dtype": job["dtype"]}
    return kvcache.Engine.from_pretrained(job["model"], num_tokens=job["num_tokens"], **options)


@contextmanager
def step_ends() -> Iterator[list[float]]:
    """Note when the engine's steps end; of a text it tells only when its first and its last token came."""
    ends: list[float] = []
    step = Scheduler.step

    def noting(scheduler: Scheduler) -> bool:
        ran = step(scheduler)
        ends.append(time.perf_counter())
        return ran

    with mock.patch.object(Scheduler, "step", noting):
        yield ends


def kvcache_engine(job: Job) -> Result:
    with new_engine(job) as engine, step_ends() as ends:

        def run(prompts: list[list[int]], new_tokens: int) -> Result:
            ends.clear()
            start = time.perf_counter()
            options: dict[str, Any] = {"max_new_tokens": new_tokens, "eos_token_id": [], "do_sample": False}
            answers = engine.generate_many(prompts, progress=False, **options)
            _ = engine.statistics  # comes between two steps, so that the end of the last one is noted
            ended = [end - start for end in ends]
            firsts = [bisect_left(ended, answer.timings.first_token) for answer in answers]
            return {
                "token_seconds": [ended[first : first + new_tokens] for first in firsts],
                "token_ids": [answer.token_ids for answer in answers],
                "cached_tokens": sum(answer.usage.cached_tokens for answer in answers),
            }

        run([job["warm_up"]], 4)
        loaded = reset_peak_memory()
        rounds = [run(job["prompts"], job["new_tokens"]) for _ in range(job["rounds"])]
        return {"rounds": rounds, "loaded_nbytes": loaded, "peak_nbytes": peak_memory()}


def transformers_cache(job: Job, *, cache: str) -> Result:
    """Many prompts stay out, as benchmarks/generate.py says; the first token then tells nothing."""
    batch, context = len(job["prompts"]), len(job["prompts"][0])
    is_few = batch * context <= FEW_STEPS
    with torch.inference_mode():
        case = Case(System(cache), Setting(job["dtype"], context, batch, prefill=batch == 1 or is_few))
        case.ids = torch.tensor(job["prompts"])
        case.warm_up()
        first = case.first_token()
        for _ in range(3 if batch == 1 or is_few else 1):
            case.turn()
        result = case.finish()
    one = {
        "token_seconds": [list(accumulate([first or 0.0, *result.step_seconds]))] * batch,
        "token_ids": None if first is None else result.token_ids,
        "cached_tokens": None,
        "is_filled": first is None,
    }
    loaded = case.memory_before
    return {"rounds": [one], "loaded_nbytes": loaded, "peak_nbytes": loaded + result.peak_memory}


def speculating_engine(job: Job) -> Result:
    options: dict[str, Any] = {"max_new_tokens": job["new_tokens"], "do_sample": False}
    if job["lookup"]:
        options["prompt_lookup_num_tokens"] = job["lookup"]
    rounds = []
    with new_engine(job) as engine:
        engine.generate(job["warm_up"], max_new_tokens=4)
        for _ in range(job["rounds"]):
            (answer,) = engine.submit(job["prompts"][0], **options).result()
            decoding = answer.timings.total - answer.timings.first_token
            rounds.append({"token_ids": answer.token_ids, "seconds": decoding, "tokens": len(answer.token_ids) - 1})
    return {"rounds": rounds}


class CountingClock(Clock):
    """Also counts the tokens that come at once."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        self.counts.append(value.numel())


def speculating_transformers(job: Job) -> Result:
    model: Any = load_model(job["model"], dtype=job["dtype"]).model
    options = {"prompt_lookup_num_tokens": job["lookup"]} if job["lookup"] else {}
    ids = torch.tensor(job["prompts"])
    rounds = []
    with torch.inference_mode():
        for index in range(1 + job["rounds"]):
            clock = CountingClock()
            text = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=job["new_tokens"] if index else 4,  # first to warm up
                do_sample=False,
                streamer=clock,
                **options,
            )
            rounds.append(
                {
                    "token_ids": text[0, ids.shape[1] :].tolist(),
                    "seconds": clock.times[-1] - clock.times[1],
                    "tokens": sum(clock.counts[2:]),
                }
            )
    return {"rounds": rounds[1:]}


SIDES: dict[str, Callable[[Job], Result]] = {
    "kvcache": kvcache_engine,
    "transformers, DynamicCache": partial(transformers_cache, cache="DynamicCache"),
    "transformers, StaticCache": partial(transformers_cache, cache="StaticCache"),
}
SPECULATING: dict[str, Callable[[Job], Result]] = {
    "kvcache": speculating_engine,
    "transformers": speculating_transformers,
}
VERSIONS = {"kvcache": f"kvcache {kvcache.__version__}"}


def measure(job: Job) -> Result:
    side = job["side"]
    result = SPECULATING[side](job) if "lookup" in job else SIDES[side](job)
    return result | {"version": VERSIONS.get(side, f"transformers {transformers.__version__}")}


if __name__ == "__main__":
    job_file, result_file = map(Path, sys.argv[1:])
    result_file.write_text(json.dumps(measure(json.loads(job_file.read_text()))))
