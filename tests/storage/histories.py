"""Caches filled with known tokens, and what they must then show: full float64 attention over the visible history."""

import pytest
import torch

from tests.oracle import assert_close, attend_rows
from tests.storage.caches import CACHE_KINDS, CacheKind

NAN = float("nan")
every_kind = pytest.mark.parametrize("kind", CACHE_KINDS, ids=str)


def random_tokens(count, batch=2, heads=2, head_dim=4, v_head_dim=None, seed=0, dtype=torch.float64):
    """Return keys (B, Hkv, count, D) and values (B, Hkv, count, Dv)."""
    generator = torch.Generator().manual_seed(seed)
    k = torch.randn(batch, heads, count, head_dim, generator=generator, dtype=torch.float64)
    v = torch.randn(batch, heads, count, v_head_dim or head_dim, generator=generator, dtype=torch.float64)
    return k.to(dtype), v.to(dtype)


def random_queries(count, batch=2, heads=4, head_dim=4, seed=99):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, heads, count, head_dim, generator=generator, dtype=torch.float64)


def filled(kind: CacheKind, count: int, **options):
    """Return a cache that was given `count` tokens at once, and their keys and values."""
    cache = kind(**options)
    k, v = random_tokens(count, v_head_dim=options.get("v_head_dim"))
    cache.update(k, v)
    return cache, k, v


def rule_of(kind: CacheKind):
    """Return the options of attention that say what the kind's queries see."""
    return {"window": kind.window, "sinks": kind.sinks}


def check_attends_like_the_history(cache, kind, k, v, queries=1):
    """Check that the last `queries` tokens of the history (k, v) see what the kind's rule says."""
    q = random_queries(queries, batch=cache.batch_size)
    expected, expected_lse = attend_rows(q, k, v, **rule_of(kind))
    output, lse = cache.attend(q, return_lse=True)
    assert_close(output, expected)
    assert_close(lse, expected_lse)
    assert_close(cache.attend(q), expected)


def content(cache):
    """Return everything that a cache holds, for comparison with `==`."""
    return {**cache.meta_state, **{name: tensor.tolist() for name, tensor in cache.state.items()}}
