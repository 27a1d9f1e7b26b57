"""One case of benchmarks/generate.py, in a process of its own: a model, a kind of cache, a context.

A case is asked for its prompt first, then for tokens in turn with the other cases, and answers through a pipe.
"""

import ctypes
import gc
import resource
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, StaticCache
from transformers.generation.streamers import BaseStreamer

from kvcache.hf import cache_for, load_model, use_attention

TEXT = Path(__file__).parent / "texts" / "northanger-abbey.txt"
MODEL = "smollm2"
TURN = 9  # tokens that are decoded at a time; the first, which finds the processor's caches cold, does not count
TURNS = 3
NEW_TOKENS = 1 + TURN * TURNS  # the first comes with the prompt
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class System:
    """A cache, and whose attention reads it."""

    name: str
    storage: str | None = None
    fused: bool = False

    def new_cache(self, model: Any, tokens: int) -> Any:
        if self.name == "DynamicCache":
            return DynamicCache(config=model.config)
        if self.name == "StaticCache":
            return StaticCache(config=model.config, max_cache_len=tokens)
        return cache_for(model, storage=self.storage)

    def attention(self, model: Any) -> AbstractContextManager[Any]:
        return use_attention(model) if self.fused else nullcontext()


@dataclass(frozen=True)
class Setting:
    """What all systems are measured with."""

    dtype: str
    context: int  # tokens of each prompt
    batch: int
    prefill: bool  # whether the prompt is processed; if not, the cache is filled with numbers

    def __str__(self) -> str:
        prompts = "one prompt" if self.batch == 1 else f"{self.batch} prompts"
        return f"{self.dtype}, {prompts} of {self.context:,} tokens"


@dataclass
class Result:
    """What one case measured; memory and cache in bytes, times in seconds."""

    prefill_seconds: float | None = None
    peak_memory: int = 0  # beyond the process with the model loaded and used once
    cache_nbytes: int = 0  # of all buffers
    step_seconds: list[float] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)

    def as_row(self, batch: int) -> dict[str, Any]:
        row = asdict(self)
        step = statistics.median(row.pop("step_seconds"))
        return row | {"step_milliseconds": step * 1e3, "tokens_per_second": batch / step}


class Clock(BaseStreamer):
    """Notes when each step's tokens came: `generate` hands a streamer the prompt first."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class Case:
    """A model in memory, one cache and the text so far."""

    def __init__(self, system: System, setting: Setting) -> None:
        self.system, self.setting = system, setting
        self.model, tokenizer = load_model(MODEL, dtype=setting.dtype)
        self.result = Result()
        text = torch.tensor(tokenizer(TEXT.read_text()).input_ids)
        first_tokens = torch.arange(setting.batch)[:, None] * setting.context
        self.ids = text[(first_tokens + torch.arange(setting.context)) % len(text)]  # (B, T), the text over and over
        self.cache = system.new_cache(self.model, setting.context + NEW_TOKENS)
        self.memory_before = 0

    def warm_up(self) -> None:
        """Do what a process does only once; what it has in memory then is the model and no cache."""
        self._generate(self.ids[:, :64], self.system.new_cache(self.model, 80), 3)
        gc.collect()
        self.memory_before = reset_peak_memory()

    def first_token(self) -> float | None:
        """Take in the prompt and generate one token; return the seconds, None if the prompt was not processed."""
        before = time.perf_counter()
        if not self.setting.prefill:
            self._fill(self.setting.context - 1)
        times = self._continue(1)
        if self.setting.prefill:
            self.result.prefill_seconds = times[0] - before
        return self.result.prefill_seconds

    def turn(self) -> float:
        """Generate the tokens of one turn; return the median seconds of a step."""
        times = self._continue(TURN)
        steps = [after - before for before, after in pairwise(times)]
        self.result.step_seconds += steps
        return statistics.median(steps)

    def finish(self) -> Result:
        self.result.peak_memory = peak_memory() - self.memory_before
        self.result.cache_nbytes = cache_nbytes(self.cache)
        self.result.token_ids = self.ids[:, self.setting.context :].tolist()
        return self.result

    def _continue(self, new_tokens: int) -> list[float]:
        self.ids, times = self._generate(self.ids, self.cache, new_tokens)
        return times

    def _generate(self, ids: torch.Tensor, cache: Any, new_tokens: int) -> tuple[torch.Tensor, list[float]]:
        """Return the longer text, and when each of the new tokens came."""
        clock = Clock()
        with self.system.attention(self.model):
            text = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                cache=cache,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                streamer=clock,
            )
        return text, clock.times[1:]

    def _fill(self, tokens: int) -> None:
        """Store random keys and values in place of the prompt's; how long a step takes does not depend on them."""
        config = self.model.config
        shape = self.setting.batch, config.num_key_value_heads, tokens, config.head_dim
        k, v = torch.randn(2, *shape).to(self.model.dtype)
        for layer in range(config.num_hidden_layers):
            self.cache.update(k, v, layer)


def cache_nbytes(cache: Any) -> int:
    if isinstance(cache, DynamicCache | StaticCache):
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return int(cache.nbytes)


def reset_peak_memory() -> int:
    """Give freed memory back and let the peak begin anew, where that is possible; return the bytes in memory now."""
    if CLEAR.exists():
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
        if trim is not None:
            trim(0)
        CLEAR.write_text("5")
    return peak_memory()


def peak_memory() -> int:
    """Return the largest number of bytes that the process had in memory."""
    if STATUS.exists():
        lines = STATUS.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def serve(system: System, setting: Setting, connection: Connection) -> None:
    """Answer each request by its result, until told to finish."""
    with torch.inference_mode():
        case = Case(system, setting)
        connection.send(None)
        requests: dict[str, Callable[[], Any]] = {
            "warm up": case.warm_up,
            "first token": case.first_token,
            "turn": case.turn,
            "finish": case.finish,
        }
        request = ""
        while request != "finish":
            request = connection.recv()
            connection.send(requests[request]())
