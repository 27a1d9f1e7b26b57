"""The bare operation: one head takes in one new token.

The new key and value join the cached rows, and the new query attends to all of them. The array library is
whatever the arguments are: NumPy, PyTorch, JAX or any other that `array-api-compat` knows.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import array_api_compat
import array_api_compat.torch
import torch

from kvcache.checks import check_floating, check_shape, dtype_name
from kvcache.errors import InvalidTypeError, InvalidValueError
from kvcache.precision import without_autocast

Array: TypeAlias = Any
"""An array of any library that follows the array API standard; the standard has no class for it."""


def kv_cache_step(cached_K: Array, cached_V: Array, new_q: Array, new_k: Array, new_v: Array) -> dict[str, Array]:
    """Append one token's key and value to the cached rows and attend to all of them with its query.

    The output is `softmax(new_q updated_K^T / sqrt(D)) updated_V` (Vaswani et al. 2017, section 3.2.1). There is
    no mask: the newest token sees every row. float16 and bfloat16 are computed in float32 and rounded once at
    the end, also under `torch.autocast`, so scores beyond the range of float16 still give a finite output.

    All five arrays have one library, one device and one dtype: float16, bfloat16, float32 or float64.

    Args:
        cached_K: (L, D), the keys of the L >= 0 tokens before this one; D >= 1.
        cached_V: (L, D), their values.
        new_q: (1, D), the new token's query.
        new_k: (1, D), its key.
        new_v: (1, D), its value.

    Returns:
        A dictionary of new arrays in that dtype on that device, which share no memory with the arguments:
        `output` (1, D), exactly `new_v` for L = 0; `updated_K` and `updated_V` (L+1, D), the cached rows
        followed by the new one.

    Raises:
        InvalidTypeError: (a `TypeError`) an argument is not an array, is of another library or dtype than
            `cached_K`, or the dtype is none of the four.
        InvalidValueError: (a `ValueError`) an argument has a wrong rank or shape, D = 0, or an argument is on
            another device than `cached_K`.

    Keys of zero score alike, so the output is the mean of the values 1, 2 and 3:

    >>> import numpy
    >>> one = numpy.ones((1, 1))
    >>> step = kv_cache_step(numpy.zeros((2, 1)), numpy.asarray([[1.0], [2.0]]), one, 0 * one, 3 * one)
    >>> round(float(step["output"][0, 0]), 12)
    2.0
    >>> step["updated_V"].tolist()
    [[1.0], [2.0], [3.0]]
    """
    xp = _check_arguments(cached_K=cached_K, cached_V=cached_V, new_q=new_q, new_k=new_k, new_v=new_v)
    dtype, head_dim = cached_K.dtype, cached_K.shape[1]
    wide = xp.float64 if dtype == xp.float64 else xp.float32

    with _without_autocast(cached_K):
        updated_K = xp.concat((cached_K, new_k), axis=0)
        updated_V = xp.concat((cached_V, new_v), axis=0)
        keys, values, query = (xp.astype(rows, wide, copy=False) for rows in (updated_K, updated_V, new_q))

        # Sums of products: a library may run a matrix product in less than its dtype (TF32, bfloat16). The query
        # is scaled, and the weights are normalised, before they meet large keys and values that would overflow.
        scores = xp.sum(keys * (query * head_dim**-0.5), axis=1, keepdims=True)  # (L+1, 1)
        weights = xp.exp(scores - xp.max(scores, axis=0, keepdims=True))
        weights = weights / xp.sum(weights, axis=0, keepdims=True)
        output = xp.sum(weights * values, axis=0, keepdims=True)
        return {"output": xp.astype(output, dtype, copy=False), "updated_K": updated_K, "updated_V": updated_V}


def _check_arguments(**arrays: Array) -> Any:
    """Check the five arrays and return the namespace of their library."""
    libraries = {name: _library(name, array) for name, array in arrays.items()}
    first, library = arrays["cached_K"], libraries["cached_K"]
    check_shape("cached_K", first.shape, (None, None), "(L, D)")
    length, head_dim = first.shape
    if head_dim == 0:
        raise InvalidValueError(f"cached_K has shape {tuple(first.shape)}; expected (L, D) with D >= 1")
    check_floating("cached_K", first.dtype)

    for name, array in arrays.items():
        if libraries[name] is not library:
            theirs, ours = (x.__name__.removeprefix("array_api_compat.") for x in (libraries[name], library))
            raise InvalidTypeError(f"{name} is an array of {theirs}; expected {ours}, as for cached_K")
        rows, letters = (length, "(L, D)") if name.startswith("cached") else (1, "(1, D)")
        check_shape(name, array.shape, (rows, head_dim), letters)
        if array.dtype != first.dtype:
            dtype, expected = dtype_name(array.dtype), dtype_name(first.dtype)
            raise InvalidTypeError(f"{name} has dtype {dtype}; expected {expected}, as for cached_K")
        device, expected_device = getattr(array, "device", None), getattr(first, "device", None)
        if None not in (device, expected_device) and device != expected_device:  # None: traced by JAX
            raise InvalidValueError(f"{name} is on {device}; expected {expected_device}, as for cached_K")
    return library


def _library(name: str, array: Array) -> Any:
    if isinstance(array, torch.Tensor):  # torch.compile warns about the caches in array_api_compat's look-up
        return array_api_compat.torch
    if not array_api_compat.is_array_api_obj(array):
        raise InvalidTypeError(f"{name} is a {type(array).__name__}; expected an array, such as a numpy.ndarray")
    return array_api_compat.array_namespace(array)


def _without_autocast(array: Array) -> AbstractContextManager[Any]:
    # Autocast refuses to concatenate float16 rows in a bfloat16 region, and the other way round.
    return without_autocast(array.device) if isinstance(array, torch.Tensor) else nullcontext()
