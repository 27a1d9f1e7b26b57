"""Every cache class in the settings that the conformance suite runs over; a new cache joins the list.

The suite is every `test_conformance_*.py` beside this file.
"""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvcache import KVCache, SlidingWindowCache
from kvcache.storage import LayerCache


@dataclass(frozen=True)
class CacheKind:
    """A way to build a cache, and the rule by which its queries see the past."""

    name: str
    build: Callable[..., LayerCache]  # (batch_size, num_heads, head_dim, dtype=, v_head_dim=, storage=)
    window: int | None = None
    sinks: int = 0
    capacity: int | None = None  # tokens that fit in all, None: no limit

    def __str__(self) -> str:
        return self.name

    def __call__(self, batch_size: int = 2, num_heads: int = 2, head_dim: int = 4, **options: Any) -> LayerCache:
        options.setdefault("dtype", torch.float64)
        return self.build(batch_size, num_heads, head_dim, **options)


def _window(window: int, sinks: int = 0, slack: int = 0) -> CacheKind:
    def build(*sizes: int, **options: Any) -> LayerCache:
        return SlidingWindowCache(*sizes, window=window, sinks=sinks, slack=slack, **options)

    return CacheKind(f"window {window}, sinks {sinks}, slack {slack}", build, window=window, sinks=sinks)


def _contiguous(max_seq_len: int) -> CacheKind:
    def build(*sizes: int, **options: Any) -> LayerCache:
        return KVCache(*sizes, max_seq_len=max_seq_len, **options)

    return CacheKind(f"contiguous {max_seq_len}", build, capacity=max_seq_len)


CACHE_KINDS = [
    _contiguous(40),
    _window(1),
    _window(4),
    _window(4, slack=4),
    _window(3, sinks=2),
    _window(1, sinks=1),
    _window(3, sinks=2, slack=3),
    _window(64, sinks=1),
]

COPIES: dict[str, Callable[[LayerCache], LayerCache]] = {
    "copy": lambda cache: cache.copy(),
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
    "state": lambda cache: type(cache).from_state(cache.state, cache.meta_state),
}
"""Every way to an independent cache with the same content."""
