"""Caches filled with known tokens, and what they must then show: full float64 attention over the visible history.

The tokens are such that their cache stores them without loss, so that no storage has results of its own.
"""

import itertools

import pytest
import torch

from kvcache.storage.codecs import check_storage
from tests.oracle import assert_close, attend_rows
from tests.storage.caches import CACHE_KINDS, STORED_KINDS, CacheKind

NAN = float("nan")
every_kind = pytest.mark.parametrize("kind", STORED_KINDS, ids=str)
every_plain_kind = pytest.mark.parametrize("kind", CACHE_KINDS, ids=str)


def random_queries(count, batch=2, heads=4, head_dim=4, seed=99):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, heads, count, head_dim, generator=generator, dtype=torch.float64)


def filled(kind: CacheKind, count: int, **options):
    """Return a cache that was given `count` tokens at once, and their keys and values."""
    cache = kind(**options)
    k, v = kind.tokens(count, cache.dtype, head_dim=cache.head_dim, v_head_dim=cache.v_head_dim)
    cache.update(k, v)
    return cache, k, v


def rule_of(kind: CacheKind):
    """Return the options of attention that say what the kind's queries see."""
    return {"window": kind.window, "sinks": kind.sinks}


def check_attends_like_the_history(cache, kind, k, v, queries=1):
    """Check that the last `queries` tokens of the history (k, v) see what the kind's rule says."""
    q = random_queries(queries, batch=cache.batch_size)
    check_attends(cache, q, *attend_rows(q, k, v, **rule_of(kind)))


def check_attends(cache, q, expected, expected_lse):
    """Check the output and the log-sum-exp of attention over a cache, by both of its paths."""
    output, lse = cache.attend(q, return_lse=True)
    assert_close(output, expected)
    assert_close(lse, expected_lse)
    assert_close(cache.attend(q), expected)


def content(cache):
    """Return everything that a cache holds, for comparison with `==`."""
    return {**cache.meta_state, **{name: tensor.tolist() for name, tensor in cache.state.items()}}


def encoded_one_by_one(storage, k, v):
    """Return keys (B, Hkv, T, D) and values as `storage` keeps them, each row encoded without any other."""
    codecs = check_storage("storage", storage)
    kept = []
    for codec, rows in ((codecs.k, k), (codecs.v, v)):
        kept.append(torch.empty(*rows.shape[:3], codec.width(rows.shape[3]), dtype=codec.dtype))
        for index in itertools.product(*map(range, rows.shape[:3])):
            kept[-1][index] = codec.encode(rows[index])
    return tuple(kept)


def decoded(storage, k, v, head_dim=4, v_head_dim=4):
    """Return kept rows as float64 keys and values."""
    codecs = check_storage("storage", storage)
    return codecs.k.decode(k, head_dim, torch.float64), codecs.v.decode(v, v_head_dim, torch.float64)
