import itertools
import shutil

import array_api_strict
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from kvcache.errors import InvalidTypeError, InvalidValueError, KVCacheError
from kvcache.step import kv_cache_step

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


@pytest.fixture(scope="module", autouse=True)
def _jax_has_float64():
    with jax.enable_x64(True):
        yield


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


# The values


@pytest.mark.parametrize(("library", "dtype"), CASES)
@pytest.mark.parametrize("length", [0, 1, 2, 7, 33])
@pytest.mark.parametrize("head_dim", [1, 5, 64])
def test_output_is_attention_over_all_rows(library, dtype, length, head_dim):
    arguments = random_step(library, dtype, length, head_dim)
    assert_is_attention(kv_cache_step(*arguments)["output"], arguments, dtype)


@pytest.mark.parametrize(("library", "dtype"), CASES)
@pytest.mark.parametrize("length", [0, 1, 6])
def test_updated_rows_are_the_cached_rows_followed_by_the_new_one(library, dtype, length):
    cached_K, cached_V, new_q, new_k, new_v = random_step(library, dtype, length, 4)
    step = kv_cache_step(cached_K, cached_V, new_q, new_k, new_v)
    for updated, cached, new in ((step["updated_K"], cached_K, new_k), (step["updated_V"], cached_V, new_v)):
        assert np.array_equal(to_float64(updated), np.concatenate((to_float64(cached), to_float64(new))))


@pytest.mark.parametrize(("library", "dtype"), CASES)
@pytest.mark.parametrize("length", [0, 3])
def test_result_has_three_arrays_of_the_library_dtype_and_device_of_the_arguments(library, dtype, length):
    arguments = random_step(library, dtype, length, 4)
    step = kv_cache_step(*arguments)
    assert type(step) is dict
    assert set(step) == {"output", "updated_K", "updated_V"}
    assert tuple(step["output"].shape) == (1, 4)
    assert tuple(step["updated_K"].shape) == tuple(step["updated_V"].shape) == (length + 1, 4)
    for array in step.values():
        assert type(array) is type(arguments[0])
        assert array.dtype == arguments[0].dtype
        assert array.device == arguments[0].device


def test_result_is_on_the_device_of_the_arguments():
    device = array_api_strict.Device("device1")
    arguments = [array_api_strict.ones((rows, 2), device=device) for rows in (3, 3, 1, 1, 1)]
    assert all(array.device == device for array in kv_cache_step(*arguments).values())


@pytest.mark.parametrize(("library", "dtype"), CASES)
def test_keys_of_zero_give_the_mean_of_all_four_values(library, dtype):
    keys, values = np.zeros((4, 1)), np.arange(1.0, 5.0).reshape(4, 1)
    rows = keys[:3], values[:3], np.ones((1, 1)), keys[3:], values[3:]
    output = kv_cache_step(*[to_array(library, dtype, array) for array in rows])["output"]
    assert to_float64(output).item() == 2.5


@pytest.mark.parametrize(("library", "dtype"), CASES)
def test_a_query_of_zero_gives_the_mean_of_all_four_values(library, dtype):
    keys, _, _, new_key, _ = random_rows(3, 2)
    values = np.asarray([[1.0, 8.0], [2.0, 6.0], [3.0, 4.0], [4.0, 2.0]])
    rows = keys, values[:3], np.zeros((1, 2)), new_key, values[3:]
    output = kv_cache_step(*[to_array(library, dtype, array) for array in rows])["output"]
    assert to_float64(output).tolist() == [[2.5, 5.0]]


@pytest.mark.parametrize(("library", "dtype"), CASES)
def test_without_cached_rows_the_output_is_exactly_the_new_value(library, dtype):
    for seed in range(20):
        arguments = random_step(library, dtype, 0, 3, seed)
        assert np.array_equal(to_float64(kv_cache_step(*arguments)["output"]), to_float64(arguments[4]))


@pytest.mark.parametrize(("library", "steps"), [("numpy", 40), ("torch", 40), ("array_api_strict", 40), ("jax", 6)])
def test_repeated_steps_equal_full_attention_over_every_prefix(library, steps):
    rng = np.random.default_rng(1)
    queries, keys, values = rng.normal(size=(3, steps, 8))
    scores = np.where(np.tri(steps, dtype=bool), queries @ keys.T / np.sqrt(8), -np.inf)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    expected = weights / weights.sum(axis=1, keepdims=True) @ values

    cached_K = cached_V = to_array(library, "float64", np.zeros((0, 8)))
    for t in range(steps):
        new = [to_array(library, "float64", rows[t : t + 1]) for rows in (queries, keys, values)]
        step = kv_cache_step(cached_K, cached_V, *new)
        cached_K, cached_V = step["updated_K"], step["updated_V"]
        np.testing.assert_allclose(to_float64(step["output"]), expected[t : t + 1], rtol=1e-12)
    assert np.array_equal(to_float64(cached_K), keys)
    assert np.array_equal(to_float64(cached_V), values)


@given(
    case=st.sampled_from([case for case in CASES if case[0] != "jax"]),  # it compiles every shape anew
    length=st.integers(0, 40),
    head_dim=st.integers(1, 24),
    size=st.sampled_from([1e-3, 1.0, 8.0]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=100, deadline=None)
def test_any_step_is_attention_and_leaves_its_arguments_unchanged(case, length, head_dim, size, seed):
    library, dtype = case
    arguments = [to_array(library, dtype, rows) for rows in random_rows(length, head_dim, seed, size)]
    before = [to_float64(array).copy() for array in arguments]
    step = kv_cache_step(*arguments)
    assert_is_attention(step["output"], arguments, dtype)
    assert np.array_equal(to_float64(step["updated_K"]), np.concatenate((before[0], before[3])))
    assert np.array_equal(to_float64(step["updated_V"]), np.concatenate((before[1], before[4])))
    assert all(np.array_equal(to_float64(array), old) for array, old in zip(arguments, before, strict=True))


# Numbers of extreme size


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_scores_beyond_the_range_of_float16_give_the_rounded_float32_result(library):
    rows = [[300.0], [-300.0], [300.0]], [[1.0], [7.0], [2.0002]], [[300.0]], [[-300.0]], [[5.0]]
    half = [to_array(library, "float16", array) for array in rows]
    full = [to_array(library, "float32", to_float64(array)) for array in half]
    output, expected = (to_float64(kv_cache_step(*arguments)["output"]) for arguments in (half, full))
    assert output.item() == np.float16(expected.item()) == 1.5


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("score", [1e3, 1e30, 1.7e38])
def test_the_largest_score_takes_all_the_weight_however_large_it_is(library, score):
    rows = [[-score], [score], [-score]], [[1.0], [2.0], [3.0]], [[1.0]], [[0.0]], [[4.0]]
    output = kv_cache_step(*[to_array(library, "float32", array) for array in rows])["output"]
    assert to_float64(output).item() == 2.0


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_query_is_scaled_before_its_products_can_overflow(library):
    key, query = np.full((1, 16), 4e18), np.full((1, 16), 1e19)  # the sum of products is 6.4e38; a quarter fits
    rows = np.concatenate((key, -key)), np.eye(2, 16), query, 0 * key, np.zeros((1, 16))
    output = kv_cache_step(*[to_array(library, "float32", array) for array in rows])["output"]
    assert np.array_equal(to_float64(output), np.eye(1, 16))


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_mean_of_large_values_does_not_overflow(library):
    rows = np.zeros((3, 1)), np.full((3, 1), 3e38), np.ones((1, 1)), np.zeros((1, 1)), np.full((1, 1), 3e38)
    output = kv_cache_step(*[to_array(library, "float32", array) for array in rows])["output"]
    assert to_float64(output).item() == pytest.approx(3e38, rel=1e-6)


# Layouts and memory


def transposed(array):
    return array.T.copy().T if isinstance(array, np.ndarray) else array.T.clone().T


def every_second(array):
    doubled = np.repeat if isinstance(array, np.ndarray) else torch.repeat_interleave
    wide = doubled(doubled(array, 2, 0), 2, 1)
    wide[1::2], wide[:, 1::2] = np.nan, np.nan
    return wide[::2, ::2]


def slice_of_a_larger_cache(array):
    full = np.full if isinstance(array, np.ndarray) else torch.full
    larger = full((array.shape[0] + 5, array.shape[1] + 3), np.nan, dtype=array.dtype)
    larger[2 : 2 + array.shape[0], 1 : 1 + array.shape[1]] = array
    return larger[2 : 2 + array.shape[0], 1 : 1 + array.shape[1]]


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("view", [transposed, every_second, slice_of_a_larger_cache])
@pytest.mark.parametrize("length", [1, 33, 65])
def test_views_give_the_result_of_contiguous_arguments(library, view, length):
    arguments = random_step(library, "float64", length, 6)
    views = [view(array) for array in arguments]
    assert not any(array is same for array, same in zip(views, arguments, strict=True))
    for name, array in kv_cache_step(*views).items():
        expected = to_float64(kv_cache_step(*arguments)[name])
        np.testing.assert_allclose(to_float64(array), expected, rtol=1e-12)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("length", [1, 33])
def test_rows_and_columns_expanded_with_stride_zero_are_read_right(library, length):
    row, column = np.arange(1.0, 7.0).reshape(1, 6), np.linspace(-1, 1, length).reshape(length, 1)
    if library == "numpy":
        cached_V, cached_K = (np.broadcast_to(array, (length, 6)) for array in (row, column))
    else:
        cached_V, cached_K = (torch.tensor(array).expand(length, 6) for array in (row, column))
    new = [to_array(library, "float64", rows) for rows in random_rows(0, 6)[2:]]
    arguments = cached_K, cached_V, *new
    np.testing.assert_allclose(to_float64(kv_cache_step(*arguments)["output"]), reference(*arguments), rtol=1e-12)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("length", [0, 1, 4])
def test_writing_into_the_result_changes_neither_arguments_nor_the_other_results(library, dtype, length):
    arguments = random_step(library, dtype, length, 3)
    step = kv_cache_step(*arguments)
    for name, array in step.items():
        others = [*arguments, *(other for key, other in step.items() if key != name)]
        before = [to_float64(other).copy() for other in others]
        array[...] = 77
        assert all(np.array_equal(to_float64(other), old) for other, old in zip(others, before, strict=True))


@pytest.mark.parametrize("length", [0, 1, 4])
def test_numpy_finds_no_shared_memory(length):
    arguments = random_step("numpy", "float32", length, 3)
    arrays = [*kv_cache_step(*arguments).values()]
    for result, other in itertools.product(arrays, [*arguments, *arrays]):
        assert result is other or not np.shares_memory(result, other)


@pytest.mark.parametrize("length", [0, 1, 4])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_storages_are_all_different(length, backend):
    arguments = random_step("torch", "float32", length, 3)
    step = torch.compile(kv_cache_step, backend=backend, fullgraph=True)(*arguments)
    tensors = [tensor for tensor in (*arguments, *step.values()) if tensor.numel()]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)


def test_one_array_may_be_given_several_times():
    row = np.asarray([[3.0, 4.0]])
    step = kv_cache_step(row, row, row, row, row)
    assert step["output"].tolist() == [[3.0, 4.0]]
    step["updated_K"][0] = 0
    assert step["updated_V"].tolist() == [[3.0, 4.0], [3.0, 4.0]]
    assert row.tolist() == [[3.0, 4.0]]


# PyTorch: autograd, vmap, compile, autocast


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


@pytest.mark.skipif(not shutil.which("g++") and not shutil.which("clang++"), reason="no C++ compiler")
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
def test_autocast_changes_nothing(dtype, region, compiled):
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


# JAX: jit, grad


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


# What is refused


def arguments_with(name, value, library="numpy"):
    """A valid float32 step of L = 3, D = 4 in which one argument is replaced."""
    shapes = dict.fromkeys(NAMES, (1, 4)) | {"cached_K": (3, 4), "cached_V": (3, 4)}
    arguments = {key: to_array(library, "float32", np.ones(shape)) for key, shape in shapes.items()}
    return arguments | {name: value}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("cached_K", (4,), "(L, D) = (any, any)"),
        ("cached_K", (1, 3, 4), "(L, D) = (any, any)"),
        ("cached_K", (3, 0), "(L, D) with D >= 1"),
        ("cached_V", (12,), "(L, D) = (3, 4)"),
        ("cached_V", (1, 3, 4), "(L, D) = (3, 4)"),
        ("cached_V", (2, 4), "(L, D) = (3, 4)"),
        ("cached_V", (3, 5), "(L, D) = (3, 4)"),
        *(
            (name, shape, "(1, D) = (1, 4)")
            for name in ("new_q", "new_k", "new_v")
            for shape in [(), (4,), (1, 1, 4), (0, 4), (2, 4), (1, 3), (4, 1)]
        ),
    ],
)
def test_a_wrong_rank_or_shape_is_refused(library, name, shape, expected):
    wrong = to_array(library, "float32", np.ones(shape))
    with pytest.raises(InvalidValueError) as caught:
        kv_cache_step(**arguments_with(name, wrong, library))
    assert str(caught.value) == f"{name} has shape {shape}; expected {expected}"


def test_keys_that_disagree_with_everything_else_are_refused():
    with pytest.raises(InvalidValueError, match="expected"):
        kv_cache_step(**arguments_with("cached_K", np.ones((2, 4), np.float32)))
    with pytest.raises(InvalidValueError, match="expected"):
        kv_cache_step(**arguments_with("cached_K", np.ones((3, 5), np.float32)))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", ["int32", "int64", "bool", "complex64"])
def test_a_dtype_that_is_not_floating_is_refused(library, dtype):
    xp = {"numpy": np, "torch": torch, "jax": jnp, "array_api_strict": array_api_strict}[library]
    arguments = [xp.ones((rows, 4), dtype=getattr(xp, dtype)) for rows in (3, 3, 1, 1, 1)]
    with pytest.raises(InvalidTypeError) as caught:
        kv_cache_step(*arguments)
    assert str(caught.value) == (f"cached_K has dtype {dtype}; expected one of float16, bfloat16, float32, float64")


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", NAMES[1:])
def test_another_dtype_than_that_of_the_cached_keys_is_refused(library, name):
    rows = 3 if name == "cached_V" else 1
    wrong = to_array(library, "float64", np.ones((rows, 4)))
    with pytest.raises(InvalidTypeError, match=f"{name} has dtype float64; expected float32, as for cached_K"):
        kv_cache_step(**arguments_with(name, wrong, library))


@pytest.mark.parametrize("name", NAMES[1:])
def test_another_device_than_that_of_the_cached_keys_is_refused(name):
    rows = 3 if name == "cached_V" else 1
    meta = torch.ones(rows, 4, device="meta")
    with pytest.raises(InvalidValueError, match=f"{name} is on meta; expected cpu, as for cached_K"):
        kv_cache_step(**arguments_with(name, meta, "torch"))
    other = array_api_strict.ones((rows, 4), dtype=array_api_strict.float32, device=array_api_strict.Device("device1"))
    with pytest.raises(InvalidValueError, match=f"{name} is on .*device1.*; expected .*CPU_DEVICE"):
        kv_cache_step(**arguments_with(name, other, "array_api_strict"))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [[[1.0, 2.0, 3.0, 4.0]], None, 1.0, "rows", ((1.0,),)])
def test_what_is_not_an_array_is_refused(library, name, value):
    with pytest.raises(InvalidTypeError, match=f"{name} is a {type(value).__name__}; expected an array"):
        kv_cache_step(**arguments_with(name, value, library))


@pytest.mark.parametrize(("library", "other"), [*itertools.permutations(LIBRARIES, 2)])
@pytest.mark.parametrize("name", NAMES[1:])
def test_an_array_of_another_library_is_refused(library, other, name):
    foreign = to_array(other, "float32", np.ones((3 if name == "cached_V" else 1, 4)))
    with pytest.raises(
        InvalidTypeError, match=rf"{name} is an array of {other}(\.numpy)?; expected {library}(\.numpy)?, as"
    ):
        kv_cache_step(**arguments_with(name, foreign, library))


def test_errors_are_built_in_ones_too():
    with pytest.raises(ValueError, match="new_q") as wrong_shape:
        kv_cache_step(**arguments_with("new_q", np.ones((2, 4), np.float32)))
    with pytest.raises(TypeError, match="new_q") as wrong_type:
        kv_cache_step(**arguments_with("new_q", None))
    assert isinstance(wrong_shape.value, KVCacheError)
    assert isinstance(wrong_type.value, KVCacheError)
