"""On what machine a benchmark ran, in one line, as every table and every results file names it."""

import platform
from pathlib import Path

import torch

CPU_INFO = Path("/proc/cpuinfo")


def cpu_name() -> str:
    """Return the processor's name as Linux tells it, elsewhere as Python does."""
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def machine() -> str:
    """Return processor, threads and version of torch: "AMD EPYC, 2 threads, torch 2.13.0+cpu"."""
    return f"{cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
