"""Argument checks shared by the whole package.

Each check raises an error that names the argument, what it has and what was expected.
"""

import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any

import torch

from kvcache.errors import InvalidTypeError, InvalidValueError

FLOATING_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_TORCH_FLOATING = frozenset(FLOATING_DTYPES)


def dtype_name(dtype: Any) -> str:
    """Return `"float32"` for `torch.float32`, and likewise for the dtypes of other libraries."""
    return str(dtype).rpartition(".")[2]


FLOATING_NAMES = tuple(dtype_name(dtype) for dtype in FLOATING_DTYPES)


def check_int(name: str, value: Any, minimum: int) -> int:
    """Return `value` as a plain int; it must be an integer (not a bool) and at least `minimum`."""
    if isinstance(value, bool):
        raise InvalidTypeError(f"{name} is a bool ({value}); expected an integer >= {minimum}")
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidTypeError(
            f"{name} is a {type(value).__name__} ({value!r}); expected an integer >= {minimum}"
        ) from None
    if number < minimum:
        raise InvalidValueError(f"{name} is {number}; expected an integer >= {minimum}")
    return number


def check_up_to_seq_len(name: str, value: Any, seq_len: int) -> int:
    """Return `value`, a number of a sequence's tokens, as a plain int in [0, seq_len]."""
    number = check_int(name, value, minimum=0)
    if number > seq_len:
        raise InvalidValueError(f"{name} is {number}; expected at most seq_len = {seq_len}")
    return number


def check_float(name: str, value: Any) -> float:
    """Return `value`, a real number of Python or NumPy, as a plain finite float."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidTypeError(f"{name} is a {type(value).__name__}; expected a float")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not -math.inf < number < math.inf:  # which torch.compile can follow where the number changes
        raise InvalidValueError(f"{name} is {number}; expected a finite number")
    return number


def check_bool(name: str, value: Any) -> bool:
    """Return `value` if it is a bool."""
    if not isinstance(value, bool):
        raise InvalidTypeError(f"{name} is a {type(value).__name__} ({value!r}); expected a bool")
    return value


def check_dtype(name: str, dtype: Any) -> torch.dtype:
    """Return `dtype`, given as a torch dtype or its name, if it is one of `FLOATING_DTYPES`."""
    resolved = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if resolved in FLOATING_DTYPES:
        assert isinstance(resolved, torch.dtype)
        return resolved
    expected = ", ".join(FLOATING_NAMES)
    error = InvalidValueError if isinstance(dtype, (str, torch.dtype)) else InvalidTypeError
    raise error(f"{name} is {dtype!r}; expected one of {expected}")


def check_device(name: str, device: Any) -> torch.device:
    """Return `device` as the `torch.device` that tensors made there have ("cuda" as "cuda:0"), if torch can use it."""
    try:
        return torch.empty(0, device=torch.device(device)).device
    except (RuntimeError, TypeError, AssertionError, ImportError) as cause:
        reason = str(cause).partition("\n")[0]
        raise InvalidValueError(f"{name} is {device!r}; expected a device that torch can use here: {reason}") from cause


def check_floating(name: str, dtype: Any) -> None:
    """Check that the array `name` has one of `FLOATING_DTYPES`, of whatever library."""
    if dtype not in FLOATING_DTYPES and dtype_name(dtype) not in FLOATING_NAMES:
        raise InvalidTypeError(f"{name} has dtype {dtype_name(dtype)}; expected one of {', '.join(FLOATING_NAMES)}")


def check_range(name: str, values: torch.Tensor, low: int, high: int | None = None) -> None:
    """Check that every entry of the integer tensor `values` is at least `low` and at most `high`."""
    if values.numel() == 0:
        return
    smallest, largest = (int(bound) for bound in torch.aminmax(values))
    if smallest < low or (high is not None and largest > high):
        bad = smallest if smallest < low else largest
        allowed = f">= {low}" if high is None else f"in [{low}, {high}]"
        raise InvalidValueError(f"{name} holds {bad}; expected every entry {allowed}")


def check_shape(name: str, actual: Sequence[int], expected: Sequence[int | None], letters: str) -> None:
    """Check that `actual` has the sizes of `expected` (None: any size); `letters` names them in the error."""
    if len(actual) == len(expected):
        for have, want in zip(actual, expected):  # noqa: B905  # a plain loop: every token passes here many times
            if have != want and want is not None:
                break
        else:
            return
    wanted = ", ".join("any" if size is None else str(size) for size in expected)
    raise InvalidValueError(f"{name} has shape {tuple(actual)}; expected {letters} = ({wanted})")


def check_on_device(name: str, actual: torch.device, expected: torch.device) -> None:
    """Check that what `name` is given lives on the device `expected`."""
    if actual != expected:
        raise InvalidValueError(f"{name} is on {actual}; expected {expected}")


def check_tensor(
    name: str, tensor: Any, shape: Sequence[int | None], letters: str, device: torch.device | None = None
) -> torch.Tensor:
    """Return `tensor` if it is a floating-point tensor of `shape` (None: any size) on `device` (None: any).

    `letters` names the dimensions in the error, for instance `"(B, Hkv, T, D)"`.
    """
    if not isinstance(tensor, torch.Tensor):
        raise InvalidTypeError(f"{name} is a {type(tensor).__name__}; expected a torch.Tensor {letters}")
    if tensor.shape != shape:  # as a tuple: most often every size is known, and every token passes here many times
        check_shape(name, tensor.shape, shape, letters)
    if tensor.dtype not in _TORCH_FLOATING:
        check_floating(name, tensor.dtype)
    if device is not None and tensor.device != device:
        check_on_device(name, tensor.device, device)
    return tensor


def check_integers(name: str, tensor: torch.Tensor, letters: str) -> None:
    """Check that the tensor's dtype is one of integers (not bool)."""
    if tensor.dtype == torch.int64:
        return
    if tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex():
        raise InvalidTypeError(f"{name} has dtype {dtype_name(tensor.dtype)}; expected integers {letters}")


def check_int_tensor(
    name: str, value: Any, shape: Sequence[int | None], letters: str, device: torch.device
) -> torch.Tensor:
    """Return `value`, an integer tensor or nested sequence of ints, as an int64 tensor of `shape` on `device`."""
    if isinstance(value, torch.Tensor):
        tensor = value
        check_on_device(name, tensor.device, device)
    else:
        try:
            tensor = torch.tensor(value.tolist() if hasattr(value, "tolist") else value, device=device)
        except (TypeError, ValueError, RuntimeError):
            raise InvalidTypeError(
                f"{name} is a {type(value).__name__} ({value!r}); expected integers {letters}"
            ) from None
        if tensor.numel() == 0:
            tensor = tensor.to(torch.int64)  # an empty list has no dtype of its own
    check_integers(name, tensor, letters)
    check_shape(name, tensor.shape, shape, letters)
    return tensor if tensor.dtype == torch.int64 else tensor.to(torch.int64)
