"""A KV cache for decoding transformers in PyTorch: exact, fast and checked against a run without a cache."""

from typing import Any

from kvcache.attention import attend, merge_attention
from kvcache.costs import cache_nbytes, count_qkv_projections
from kvcache.errors import (
    CacheFullError,
    InvalidTypeError,
    InvalidValueError,
    KVCacheError,
    ModelError,
    RollbackError,
)
from kvcache.modules import CausalSelfAttentionWithCache
from kvcache.step import kv_cache_step
from kvcache.storage import KVCache, SlidingWindowCache

__all__ = [
    "CacheFullError",
    "CausalSelfAttentionWithCache",
    "InvalidTypeError",
    "InvalidValueError",
    "KVCache",
    "KVCacheError",
    "ModelError",
    "RollbackError",
    "SlidingWindowCache",
    "attend",
    "cache_nbytes",
    "count_qkv_projections",
    "kv_cache_step",
    "merge_attention",
]


def __getattr__(name: str) -> Any:
    """Import `kvcache.hf`, and transformers with it, when it is first asked for."""
    if name == "hf":
        import kvcache.hf

        return kvcache.hf
    raise AttributeError(f"module 'kvcache' has no attribute {name!r}")
