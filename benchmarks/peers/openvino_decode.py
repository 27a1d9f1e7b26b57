"""OpenVINO's side of benchmarks/decode.py, for its environment's Python: `openvino_decode.py job.json result.json`.

Job and result are those of benchmarks/decode_case.py. Of this repository it imports nothing. The pipeline with
continuous batching is the one that takes several prompts and keeps prefixes; it stores keys and values in 8 bits, as
OpenVINO does by default on a CPU.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino  # type: ignore[import-not-found]
import openvino_genai  # type: ignore[import-not-found]

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def run(pipeline: Any, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """Ask for all prompts at once, and step until all have their new tokens."""
    config = openvino_genai.GenerationConfig()
    config.do_sample, config.ignore_eos = False, True
    config.max_new_tokens = config.min_new_tokens = new_tokens
    start = time.perf_counter()
    handles = [
        pipeline.add_request(index, openvino.Tensor(np.array([prompt], dtype=np.int64)), config)
        for index, prompt in enumerate(prompts)
    ]
    times: list[list[float]] = [[] for _ in prompts]
    tokens: list[list[int]] = [[] for _ in prompts]
    while pipeline.has_non_finished_requests():
        pipeline.step()
        now = time.perf_counter() - start
        for index, handle in enumerate(handles):
            while handle.can_read():
                for output in handle.read().values():
                    tokens[index] += output.generated_ids
                    times[index] += [now] * len(output.generated_ids)
    return {"token_seconds": times, "token_ids": tokens, "cached_tokens": None}


def peak_memory() -> int:
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def measure(job: dict[str, Any]) -> dict[str, Any]:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = job["memory"] >> 30  # GiB
    scheduler.enable_prefix_caching = True
    pipeline = openvino_genai.ContinuousBatchingPipeline(job["gguf"], scheduler, "CPU")
    run(pipeline, [job["warm_up"]], 4)
    CLEAR.write_text("5")  # the peak begins anew
    loaded = peak_memory()
    rounds = [run(pipeline, job["prompts"], job["new_tokens"]) for _ in range(job["rounds"])]
    return {
        "rounds": rounds,
        "loaded_nbytes": loaded,
        "peak_nbytes": peak_memory(),
        "version": f"OpenVINO GenAI {openvino_genai.get_version()}",
    }


if __name__ == "__main__":
    job_file, result_file = map(Path, sys.argv[1:])
    result_file.write_text(json.dumps(measure(json.loads(job_file.read_text()))))
