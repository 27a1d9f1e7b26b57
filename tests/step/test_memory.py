"""Layouts of the arguments, and memory that nobody shares."""

import itertools

import numpy as np
import pytest
import torch

from kvcache import kv_cache_step
from tests.step.arrays import random_rows, random_step, reference, to_array, to_float64


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
def test_views_give_the_result_of_contiguous_arguments(library, view, length):  # case B12
    arguments = random_step(library, "float64", length, 6)
    views = [view(array) for array in arguments]
    assert not any(array is same for array, same in zip(views, arguments, strict=True))
    for name, array in kv_cache_step(*views).items():
        expected = to_float64(kv_cache_step(*arguments)[name])
        np.testing.assert_allclose(to_float64(array), expected, rtol=1e-12)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("length", [1, 33])
def test_rows_and_columns_expanded_with_stride_zero_are_read_right(library, length):  # case B12
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
