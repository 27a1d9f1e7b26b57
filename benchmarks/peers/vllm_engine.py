"""vLLM's side of benchmarks/engine.py, for the Python of its own environment: `vllm_engine.py job.json result.json`.

Job and result are those of benchmarks/engine_case.py. Of this repository it imports nothing.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
MAX_LENGTH = 4096


def run(engine: Any, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """Ask for all prompts at once, and step until all have their new tokens."""
    sampling = SamplingParams(
        temperature=0, max_tokens=new_tokens, min_tokens=new_tokens, ignore_eos=True, detokenize=False
    )
    start = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), {"prompt_token_ids": prompt}, sampling)
    firsts: dict[int, float] = {}
    lasts: dict[int, float] = {}
    outputs: dict[int, Any] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            index = int(output.request_id)
            outputs[index], lasts[index] = output, time.perf_counter() - start
            firsts.setdefault(index, lasts[index])
    order = range(len(prompts))
    return {
        "seconds": time.perf_counter() - start,
        "token_ids": [list(outputs[index].outputs[0].token_ids) for index in order],
        "first_token_seconds": [firsts[index] for index in order],
        "step_seconds": [(lasts[index] - firsts[index]) / (new_tokens - 1) for index in order],
        "cached_tokens": sum(outputs[index].num_cached_tokens for index in order),
    }


def peak_memory() -> int:
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def measure(job: dict[str, Any]) -> dict[str, Any]:
    engine = LLM(job["model"], dtype=job["dtype"], max_model_len=MAX_LENGTH).llm_engine
    run(engine, [job["warm_up"]], 4)
    CLEAR.write_text("5")  # the peak begins anew
    loaded = peak_memory()
    rounds = [run(engine, prompts, job["new_tokens"]) for prompts in job["rounds"]]
    return {"rounds": rounds, "loaded_nbytes": loaded, "peak_nbytes": peak_memory()}


if __name__ == "__main__":
    job_file, result_file = map(Path, sys.argv[1:])
    result_file.write_text(json.dumps(measure(json.loads(job_file.read_text()))))
