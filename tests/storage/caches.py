"""Every cache class in the settings that the conformance suite runs over; a new cache joins the list.

The suite is every `test_conformance_*.py` beside this file.
"""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache as remembered
from typing import Any, Self

import torch

from kvcache import KVCache, PagedCache, SlidingWindowCache
from kvcache.storage import LayerCache
from kvcache.storage.codecs import check_storage


@dataclass(frozen=True)
class CacheKind:
    """A way to build a cache, how it keeps rows, and the rule by which its queries see the past."""

    name: str
    build: Callable[..., LayerCache]  # (batch_size, num_heads, head_dim, dtype=, v_head_dim=, storage=)
    window: int | None = None
    sinks: int = 0
    capacity: int | None = None  # tokens that fit in all, None: no limit
    grows: bool = False  # whether buffers are made as tokens come
    resizable: tuple[str, ...] = ()  # the sizes that `resized` takes
    storage: str | None = None  # how rows are kept, None: in the dtype that comes out

    def __str__(self) -> str:
        return self.name

    def __call__(self, batch_size: int = 2, num_heads: int = 2, head_dim: int = 4, **options: Any) -> LayerCache:
        return self.build(
            batch_size, num_heads, head_dim, **{"dtype": torch.float64, "storage": self.storage, **options}
        )

    def kept_as(self, storage: str) -> Self:
        """Return the same kind of cache with another storage."""
        return replace(self, name=f"{self.name}, {storage}", storage=storage)

    def tokens(
        self, count: int, dtype: torch.dtype = torch.float64, **sizes: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `random_tokens` that a cache of `dtype` stores without loss, as float64.

        That is what storing random tokens leaves of them: storing it again changes nothing.
        """
        k, v = _tokens_without_loss(self.storage or dtype, count, **sizes)
        return k.clone(), v.clone()


def random_tokens(
    count: int, batch: int = 2, heads: int = 2, head_dim: int = 4, v_head_dim: int | None = None, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float64 keys (B, Hkv, count, D) and values (B, Hkv, count, Dv)."""
    generator = torch.Generator().manual_seed(seed)
    k = torch.randn(batch, heads, count, head_dim, generator=generator, dtype=torch.float64)
    v = torch.randn(batch, heads, count, v_head_dim or head_dim, generator=generator, dtype=torch.float64)
    return k, v


@remembered
def _tokens_without_loss(storage: str | torch.dtype, count: int, **sizes: int | None) -> tuple[torch.Tensor, ...]:
    codecs = check_storage("storage", storage)
    return tuple(
        codec.decode(codec.encode(rows), rows.shape[-1], torch.float64)
        for codec, rows in zip((codecs.k, codecs.v), random_tokens(count, **sizes), strict=True)
    )


def _window(window: int, sinks: int = 0, slack: int = 0) -> CacheKind:
    def build(*sizes: int, **options: Any) -> LayerCache:
        return SlidingWindowCache(*sizes, window=window, sinks=sinks, slack=slack, **options)

    name = f"window {window}, sinks {sinks}, slack {slack}"
    return CacheKind(name, build, window=window, sinks=sinks, resizable=("slack", "window"))


def _contiguous(max_seq_len: int) -> CacheKind:
    def build(*sizes: int, **options: Any) -> LayerCache:
        return KVCache(*sizes, max_seq_len=max_seq_len, **options)

    return CacheKind(f"contiguous {max_seq_len}", build, capacity=max_seq_len, resizable=("max_seq_len",))


def _paged(block_size: int, max_seq_len: int | None = None) -> CacheKind:
    def build(*sizes: int, **options: Any) -> LayerCache:
        return PagedCache(*sizes, block_size=block_size, max_seq_len=max_seq_len, **options)

    name = f"blocks of {block_size}" + (f", at most {max_seq_len}" if max_seq_len else "")
    return CacheKind(name, build, capacity=max_seq_len, grows=True)


CACHE_KINDS = [
    _contiguous(40),
    _window(1),
    _window(4),
    _window(4, slack=4),
    _window(3, sinks=2),
    _window(1, sinks=1),
    _window(3, sinks=2, slack=3),
    _window(64, sinks=1),
    _paged(4),
    _paged(3, max_seq_len=40),
]
"""Every cache that keeps rows in the dtype that comes out."""

FLOAT_STORAGES = ("float32", "bfloat16", "float16")
ENCODED_STORAGES = ("int8", "int4", "int8/int4")
STORED_KINDS = [
    *CACHE_KINDS,
    *(kind.kept_as(storage) for storage in FLOAT_STORAGES + ENCODED_STORAGES for kind in CACHE_KINDS),
]
"""Every cache with every storage."""

COPIES: dict[str, Callable[[LayerCache], LayerCache]] = {
    "copy": lambda cache: cache.copy(),
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
    "state": lambda cache: type(cache).from_state(cache.state, cache.meta_state),
}
"""Every way to an independent cache with the same content."""
