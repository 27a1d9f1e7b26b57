"""Arguments that are refused, and what the errors say."""

import itertools

import array_api_strict
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from kvcache import InvalidTypeError, InvalidValueError, KVCacheError, kv_cache_step
from tests.step.arrays import LIBRARIES, NAMES, to_array


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
