"""Prompts in, tokens out: many texts at once over one model and one pool."""

from kvcache.engine.completion import Completion, Speculation, Timings
from kvcache.engine.engine import Engine
from kvcache.engine.job import Job
from kvcache.engine.options import Options
from kvcache.engine.sampling import TokenLogprobs

__all__ = ["Completion", "Engine", "Job", "Options", "Speculation", "Timings", "TokenLogprobs"]
