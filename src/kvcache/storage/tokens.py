"""Token ids as people give them, as one compact array."""

import operator
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from kvcache.checks import check_integers, check_shape
from kvcache.errors import InvalidTypeError, InvalidValueError

TokenIds = Iterable[int] | torch.Tensor


def check_tokens(tokens: Any, num_sequences: int) -> "list[array[int]]":
    """Return the new ids of each sequence, given as a list with an entry for each, or as one integer tensor (B, T)."""
    if isinstance(tokens, torch.Tensor):
        check_shape("tokens", tuple(tokens.shape), (num_sequences, None), "(B, T)")
        tokens = list(tokens)
    if not isinstance(tokens, (list, tuple)):
        raise InvalidTypeError(f"tokens is a {type(tokens).__name__}; expected a list of token ids for each sequence")
    if len(tokens) != num_sequences:
        raise InvalidValueError(f"tokens has {len(tokens)} entries; expected one for each of {num_sequences} sequences")
    return [check_token_ids(f"tokens[{index}]", ids) for index, ids in enumerate(tokens)]


def check_token_ids(name: str, ids: Any) -> "array[int]":
    """Return a list, range or 1-D integer tensor (or array) of at least one id, none negative, as int64."""
    if isinstance(ids, torch.Tensor):
        check_integers(name, ids, "(T,)")
        check_shape(name, tuple(ids.shape), (None,), "(T,)")
        ids = ids.tolist()
    if isinstance(ids, Mapping):
        raise InvalidTypeError(f"{name} is a {type(ids).__name__}; expected a list of token ids, such as its input_ids")
    if isinstance(ids, (str, bytes, bytearray)) or not isinstance(ids, Iterable):
        raise InvalidTypeError(f"{name} is a {type(ids).__name__}; expected a list of token ids")
    ids = list(ids)
    result = _as_ids(name, ids)
    if not result:
        raise InvalidValueError(f"{name} is empty; expected at least one token id")
    if min(result) < 0:
        index, value = next((index, value) for index, value in enumerate(result) if value < 0)
        raise InvalidValueError(f"{name}[{index}] is {value}; expected a token id >= 0")
    return result


def _as_ids(name: str, ids: list[Any]) -> "array[int]":
    if set(map(type, ids)) == {int}:  # as nearly always: many times faster than one by one
        try:
            return array("q", ids)
        except OverflowError:
            pass  # which one it is is found below
    result = array("q")
    for index, value in enumerate(ids):
        try:
            result.append(_as_id(value))
        except TypeError:
            message = f"{name}[{index}] is a {type(value).__name__} ({value!r}); expected an integer token id"
            raise InvalidTypeError(message) from None
        except OverflowError:
            raise InvalidValueError(f"{name}[{index}] is {value}; expected an integer of 64 bits") from None
    return result


def _as_id(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)
