"""Rows for `kv_cache_step` in every array library and dtype, and the float64 result that they must give."""

import itertools

import array_api_strict
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch

NAMES = ("cached_K", "cached_V", "new_q", "new_k", "new_v")
LIBRARIES = ("numpy", "torch", "jax", "array_api_strict")
CASES = [
    (library, dtype)
    for library, dtype in itertools.product(LIBRARIES, ("float16", "bfloat16", "float32", "float64"))
    if library != "array_api_strict" or dtype in ("float32", "float64")
]
# Half a unit in the last place, and what the arithmetic before the rounding may be off by.
ROUNDING = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 0.0, "float64": 0.0}
ARITHMETIC = {"float16": 2e-6, "bfloat16": 2e-6, "float32": 2e-6, "float64": 1e-14}


def to_array(library, dtype, rows):
    rows = np.asarray(rows, dtype=np.float64)
    if library == "torch":
        return torch.tensor(rows.ravel(), dtype=getattr(torch, dtype)).reshape(rows.shape)
    if library == "jax":
        return jnp.asarray(rows, dtype=dtype)
    if library == "array_api_strict":
        return array_api_strict.astype(array_api_strict.asarray(rows), getattr(array_api_strict, dtype))
    return rows.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def to_float64(array):
    if isinstance(array, torch.Tensor):
        return array.detach().double().numpy()
    return np.asarray(array).astype(np.float64)


def random_rows(length, head_dim, seed=0, size=2.0):
    rng = np.random.default_rng(seed)
    cached = rng.normal(size=(2, length, head_dim))
    new = rng.normal(size=(3, 1, head_dim))
    return size * cached[0], cached[1], new[0], size * new[1], new[2]


def random_step(library, dtype, length, head_dim, seed=0):
    return [to_array(library, dtype, rows) for rows in random_rows(length, head_dim, seed)]


def reference(cached_K, cached_V, new_q, new_k, new_v):
    """Attention of one query over all rows, in float64."""
    cached_K, cached_V, new_q, new_k, new_v = map(to_float64, (cached_K, cached_V, new_q, new_k, new_v))
    scores = new_q @ np.concatenate((cached_K, new_k)).T / np.sqrt(new_q.shape[1])
    weights = np.exp(scores - scores.max())
    return weights / weights.sum() @ np.concatenate((cached_V, new_v))


def assert_is_attention(output, arguments, dtype):
    expected = reference(*arguments)
    largest = max(np.abs(to_float64(arguments[name])).max(initial=0) for name in (1, 4))
    error = np.abs(to_float64(output) - expected)
    assert (error <= ROUNDING[dtype] * np.abs(expected) + ARITHMETIC[dtype] * largest).all()
