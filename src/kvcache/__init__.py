"""A KV cache for decoding transformers in PyTorch: exact, fast and checked against a run without a cache."""

from importlib import import_module
from typing import Any

from kvcache.attention import attend, merge_attention
from kvcache.costs import cache_nbytes, count_qkv_projections
from kvcache.errors import (
    CacheFullError,
    EngineClosedError,
    InvalidTypeError,
    InvalidValueError,
    KVCacheError,
    ModelError,
    NotSupportedError,
    OutOfBlocksError,
    RollbackError,
)
from kvcache.modules import CausalSelfAttentionWithCache
from kvcache.prefix import Media, PrefixCache
from kvcache.step import kv_cache_step
from kvcache.storage import BlockPool, CacheSpec, KVCache, LayerSpec, PagedCache, Sequence, SlidingWindowCache

__all__ = [
    "BlockPool",
    "CacheFullError",
    "CacheSpec",
    "CausalSelfAttentionWithCache",
    "EngineClosedError",
    "InvalidTypeError",
    "InvalidValueError",
    "KVCache",
    "KVCacheError",
    "LayerSpec",
    "Media",
    "ModelError",
    "NotSupportedError",
    "OutOfBlocksError",
    "PagedCache",
    "PrefixCache",
    "RollbackError",
    "Sequence",
    "SlidingWindowCache",
    "attend",
    "cache_nbytes",
    "count_qkv_projections",
    "kv_cache_step",
    "merge_attention",
]


def __dir__() -> list[str]:
    return sorted({*__all__, *globals(), "Engine", "engine", "hf", "verify", "__version__"})


def __getattr__(name: str) -> Any:
    """Import what is costly only when it is asked for: `hf`, `verify`, `engine` and its `Engine`, and the version."""
    if name in ("engine", "hf", "verify"):
        return import_module(f"kvcache.{name}")
    if name == "Engine":
        return import_module("kvcache.engine").Engine
    if name == "__version__":
        from importlib.metadata import version

        return version("torch-kvcache")
    raise AttributeError(f"module 'kvcache' has no attribute {name!r}")
