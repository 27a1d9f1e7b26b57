"""Rows that tell all that they depend on, and attention over them, in NumPy.

A token's state is a number that follows from everything its rows may depend on. Keys and queries are drawn from a table
by it, and values are the number itself: rows that are equal are of equal states.
"""

import math
from functools import cache

import numpy as np
import torch

from kvcache import LayerSpec

STATE_BITS = 50  # so that a value, the state as a fraction behind a small integer, is exact in float64
NUM_ROWS = 1024


class StateRows:
    """What one layer keeps of a token in a state, and attention over that."""

    def __init__(self, layer: LayerSpec, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self._layer = layer
        k_dim, v_dim = layer.head_dims
        self._keys = generator.standard_normal((NUM_ROWS, layer.num_heads, k_dim))
        self._queries = generator.standard_normal((NUM_ROWS, 2 * layer.num_heads, k_dim))
        self._offsets = np.arange(layer.num_heads * v_dim).reshape(1, layer.num_heads, v_dim)

    def keys(self, states: np.ndarray) -> np.ndarray:  # (n,) -> (n, Hkv, D)
        return self._keys[states % NUM_ROWS]

    def values(self, states: np.ndarray) -> np.ndarray:  # (n,) -> (n, Hkv, Dv), another for each state
        return states[:, None, None] / (1 << STATE_BITS) + self._offsets

    def queries(self, states: np.ndarray) -> np.ndarray:  # (n,) -> (n, H, D)
        return self._queries[states % NUM_ROWS]

    def attention(self, states: np.ndarray, count: int) -> np.ndarray:
        """Return the output (count, H, Dv) of the last tokens."""
        layer = self._layer
        q = self.queries(states[-count:]).reshape(count, layer.num_heads, 2, -1).transpose(1, 2, 0, 3)
        scores = q @ self.keys(states).transpose(1, 2, 0)[:, None] / math.sqrt(layer.head_dim)
        weights = np.exp(scores + _mask(len(states), count, layer.window, layer.sinks))
        output = weights @ self.values(states).swapaxes(0, 1)[:, None] / weights.sum(-1, keepdims=True)
        return output.transpose(2, 0, 1, 3).reshape(count, 2 * layer.num_heads, -1)


@cache
def _mask(length: int, count: int, window: int | None, sinks: int) -> np.ndarray:
    """Return 0 where the last tokens see another, else -inf."""
    other, position = np.arange(length), np.arange(length - count, length)[:, None]
    seen = other <= position
    if window is not None:
        seen &= (position - other < window) | (other < sinks)
    return np.where(seen, 0, -np.inf)


def as_heads(rows: np.ndarray) -> torch.Tensor:
    """Return rows (n, heads, size) as a step takes them, (1, heads, n, size)."""
    return torch.from_numpy(rows).transpose(0, 1)[None]
