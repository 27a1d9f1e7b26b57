"""llama.cpp's side of benchmarks/decode.py, for its environment's Python: `llama_decode.py job.json result.json`.

Job and result are those of benchmarks/decode_case.py. Of this repository it imports nothing. `Llama` has one text, and
finds what a prompt has in common with the one before it.
"""

import json
import sys
import time
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

from llama_cpp import Llama  # type: ignore[import-not-found]

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def run(llama: Any, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    (prompt,) = prompts
    start = time.perf_counter()
    times, tokens = [], []
    for token in islice(llama.generate(prompt, temp=0.0), new_tokens):
        times.append(time.perf_counter() - start)
        tokens.append(token)
    return {"token_seconds": [times], "token_ids": [tokens], "cached_tokens": None}


def peak_memory() -> int:
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def measure(job: dict[str, Any]) -> dict[str, Any]:
    threads = {"n_threads": job["threads"], "n_threads_batch": job["threads"]}
    llama = Llama(job["gguf"], n_ctx=job["max_length"], flash_attn=True, verbose=False, **threads)
    run(llama, [job["warm_up"]], 4)
    CLEAR.write_text("5")  # the peak begins anew
    loaded = peak_memory()
    rounds = [run(llama, job["prompts"], job["new_tokens"]) for _ in range(job["rounds"])]
    return {
        "rounds": rounds,
        "loaded_nbytes": loaded,
        "peak_nbytes": peak_memory(),
        "version": f"llama-cpp-python {version('llama-cpp-python')}",
    }


if __name__ == "__main__":
    job_file, result_file = map(Path, sys.argv[1:])
    result_file.write_text(json.dumps(measure(json.loads(job_file.read_text()))))
