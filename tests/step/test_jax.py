"""What JAX makes of the step: jit and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from kvcache import kv_cache_step
from tests.step.arrays import assert_is_attention, random_rows, random_step


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("length", [0, 1, 7])
def test_jit_equals_the_reference(dtype, length):
    arguments = random_step("jax", dtype, length, 5)
    step = jax.jit(kv_cache_step)(*arguments)
    assert_is_attention(step["output"], arguments, dtype)
    assert step["output"].dtype == arguments[0].dtype


def test_jit_accepts_cached_rows_that_it_does_not_trace():
    cached_K, cached_V, *new = random_step("jax", "float64", 4, 5)
    step = jax.jit(lambda *rows: kv_cache_step(cached_K, cached_V, *rows))(*new)
    assert_is_attention(step["output"], (cached_K, cached_V, *new), "float64")


def test_jax_without_float64_computes_in_float32():
    arguments = random_step("jax", "bfloat16", 4, 5)
    with jax.enable_x64(False):
        step = kv_cache_step(*arguments)
        assert_is_attention(step["output"], arguments, "bfloat16")
        assert step["output"].dtype == jnp.bfloat16


@pytest.mark.parametrize("length", [0, 1, 5])
def test_jax_gradients_equal_those_of_torch(length):
    rows = random_rows(length, 3)
    tensors = [torch.tensor(array, requires_grad=True) for array in rows]
    kv_cache_step(*tensors)["output"].square().sum().backward()
    gradients = jax.grad(lambda *arrays: (kv_cache_step(*arrays)["output"] ** 2).sum(), argnums=(0, 1, 2, 3, 4))(
        *map(jnp.asarray, rows)
    )
    for gradient, tensor in zip(gradients, tensors, strict=True):
        np.testing.assert_allclose(np.asarray(gradient), tensor.grad.numpy(), rtol=1e-10, atol=1e-14)
