"""How long the command has been running, stage by stage, and what makes it start sooner.

The garbage collector rests until everything is loaded: it would walk again and again over what packages make when
they are imported, a sixth of the whole start, and find next to nothing.
"""

import functools
import gc
import importlib
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any


def rest_collector() -> None:
    """Stop collecting garbage until `collect_again`."""
    gc.disable()


def collect_again() -> None:
    """Collect garbage again, if that was stopped, but nothing of what is there by now."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def import_transformers() -> None:
    """Import transformers, if it is installed, so that it looks through the files of all its models once and not twice.

    It does so twice, and keeps what it finds by folder in an `lru_cache` of 128 entries. The folders are more, so none
    of them is there the second time. As this is the command's own process, caches made meanwhile get no limit.
    """
    limited = functools.lru_cache

    def unlimited(maxsize: Any = 128, typed: bool = False) -> Any:
        return functools.cache(maxsize) if callable(maxsize) else limited(maxsize, typed)

    functools.lru_cache = unlimited
    try:
        with suppress(ModuleNotFoundError):  # `kvcache.hf` says what to install
            importlib.import_module("transformers.models")
    finally:
        functools.lru_cache = limited


def process_seconds() -> float:
    """Return for how long this process has been there: on Linux to 10 ms, elsewhere as psutil knows it."""
    try:
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # proc(5): starttime, 22nd
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        import psutil

        return time.time() - float(psutil.Process().create_time())


class Stopwatch:
    """Says when the stages of a start ended, counted from the start of the process.

    Attributes:
        seconds: what each stage took, in order; together the time to the end of the last one.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def end(self, stage: str) -> None:
        """Note that a stage, which follows the last one noted, has ended; only the first time."""
        if stage not in self.seconds:
            self.seconds[stage] = process_seconds() - self.total

    @property
    def total(self) -> float:
        """Seconds from the start of the process to the end of the last stage."""
        return sum(self.seconds.values())
