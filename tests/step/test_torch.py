"""What PyTorch makes of the step: gradients, vmap (and that of JAX), compile, autocast, meta tensors, CUDA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from kvcache import kv_cache_step
from tests.kernels import needs_compiler
from tests.step.arrays import assert_is_attention, random_step, reference, to_float64


@pytest.mark.parametrize("length", [0, 1, 5])
def test_torch_gradients_equal_finite_differences(length):
    arguments = [tensor.requires_grad_() for tensor in random_step("torch", "float64", length, 3)]
    assert torch.autograd.gradcheck(lambda *rows: tuple(kv_cache_step(*rows).values()), arguments)
    assert torch.autograd.gradgradcheck(lambda *rows: kv_cache_step(*rows)["output"], arguments)


def test_torch_gradients_of_half_precision_have_its_dtype():
    arguments = [tensor.requires_grad_() for tensor in random_step("torch", "bfloat16", 4, 3)]
    kv_cache_step(*arguments)["output"].sum().backward()
    assert all(tensor.grad.dtype == torch.bfloat16 for tensor in arguments)
    weights = torch.cat((arguments[1].grad, arguments[4].grad))
    assert weights.sum(dim=0).tolist() == pytest.approx([1, 1, 1], rel=0.02)


@pytest.mark.parametrize("library", ["torch", "jax"])
@pytest.mark.parametrize("length", [0, 1, 5])
def test_vmap_over_a_batch_equals_a_loop(library, length):
    rows = [random_step(library, "float64", length, 3, seed) for seed in range(4)]
    stack, vmap = (torch.stack, torch.vmap) if library == "torch" else (jnp.stack, jax.vmap)
    batch = vmap(kv_cache_step)(*[stack(arrays) for arrays in zip(*rows, strict=True)])
    for index, arguments in enumerate(rows):
        for name, expected in kv_cache_step(*arguments).items():
            np.testing.assert_allclose(to_float64(batch[name][index]), to_float64(expected), rtol=1e-12, atol=1e-15)


def test_vmap_over_the_new_token_shares_the_cached_rows():
    cached_K, cached_V, *_ = random_step("torch", "float64", 4, 3)
    new = torch.randn(3, 5, 1, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    batch = torch.vmap(kv_cache_step, in_dims=(None, None, 0, 0, 0))(cached_K, cached_V, *new)
    for index in range(5):
        expected = reference(cached_K, cached_V, *new[:, index])
        np.testing.assert_allclose(to_float64(batch["output"][index]), expected, rtol=1e-12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.filterwarnings("error::UserWarning")
def test_torch_compile_needs_one_graph_for_all_lengths_from_two_on(dtype):
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(kv_cache_step, fullgraph=True, dynamic=True, backend=counter)
    for length in range(12):
        arguments = random_step("torch", dtype, length, 5, seed=length)
        step = compiled(*arguments)
        assert_is_attention(step["output"], arguments, dtype)
        assert torch.equal(step["updated_K"], torch.cat((arguments[0], arguments[3])))
        assert torch.equal(step["updated_V"], torch.cat((arguments[1], arguments[4])))
    assert counter.frame_count <= 3  # PyTorch compiles sizes 0 and 1 apart


@needs_compiler
def test_torch_compile_with_inductor_equals_the_reference():
    torch.compiler.reset()
    compiled = torch.compile(kv_cache_step, fullgraph=True)
    for length in (0, 3, 4, 9):
        arguments = random_step("torch", "float32", length, 5, seed=length)
        before = [tensor.clone() for tensor in arguments]
        step = compiled(*arguments)
        assert_is_attention(step["output"], arguments, "float32")
        for tensor in step.values():
            tensor.add_(1)
        assert all(torch.equal(tensor, old) for tensor, old in zip(arguments, before, strict=True))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("region", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_changes_nothing(dtype, region, compiled):  # case C9
    arguments = random_step("torch", dtype, 9, 8)
    torch.compiler.reset()
    step = torch.compile(kv_cache_step, backend="aot_eager", fullgraph=True) if compiled else kv_cache_step
    with torch.autocast("cpu", dtype=region):
        inside = step(*arguments)
        assert torch.is_autocast_enabled("cpu")
    for name, outside in kv_cache_step(*arguments).items():
        assert inside[name].dtype == arguments[0].dtype
        assert torch.equal(inside[name], outside)


def test_meta_tensors_give_shapes():
    arguments = [torch.empty(rows, 4, device="meta") for rows in (3, 3, 1, 1, 1)]
    assert kv_cache_step(*arguments)["updated_K"].shape == (4, 4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("length", [0, 1, 33])
def test_cuda_tensors_give_the_reference_result_there(dtype, length):
    arguments = random_step("torch", dtype, length, 64)
    output = kv_cache_step(*[tensor.cuda() for tensor in arguments])["output"]
    assert output.is_cuda
    assert_is_attention(output.cpu(), arguments, dtype)
