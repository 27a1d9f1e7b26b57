"""Other engines that benchmarks compare with, each in an environment of its own under benchmarks/peers/envs."""

import os
from pathlib import Path

FOLDER = Path(__file__).parent


def environment(name: str) -> Path:
    return FOLDER / "envs" / name


def python(name: str) -> Path:
    """Return where the Python of a peer's environment is, or will be."""
    return environment(name) / "bin" / "python"


def vllm_variables(memory: int) -> dict[str, str]:
    """Return what vLLM runs fastest with on these cores, in one process, with so many bytes for keys and values."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(memory >> 30),  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_CONFIGURE_LOGGING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        # What follows vLLM sets for its worker processes. In one process nobody does, and it would use one thread.
        "OMP_NUM_THREADS": str(cores.count(",") + 1),
        "LD_PRELOAD": str(environment("vllm") / "lib" / "libiomp5.so"),
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{cores}]",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
    }
