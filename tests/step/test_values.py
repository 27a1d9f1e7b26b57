"""The numbers: attention over all rows, in every library and dtype, small and extreme."""

import array_api_strict
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache import kv_cache_step
from tests.step.arrays import CASES, LIBRARIES, assert_is_attention, random_rows, random_step, to_array, to_float64


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
def test_keys_of_zero_give_the_mean_of_all_four_values(library, dtype):  # case B1
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
def test_repeated_steps_equal_full_attention_over_every_prefix(library, steps):  # case B3
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
def test_scores_beyond_the_range_of_float16_give_the_rounded_float32_result(library):  # case B9
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
