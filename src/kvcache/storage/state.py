"""A cache as data that can be saved, its stored rows and plain strings and ints, and the checks on the way back."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kvcache.checks import check_int, check_tensor, dtype_name
from kvcache.errors import InvalidTypeError, InvalidValueError

VERSION = 1


class SavedCache(NamedTuple):
    """What a state holds, checked: rows for `_restore`, and the arguments of the constructor before it."""

    k: torch.Tensor  # (B, Hkv, stored_len, D)
    v: torch.Tensor  # (B, Hkv, stored_len, Dv)
    seq_len: int
    arguments: dict[str, Any]


def make_state(k: torch.Tensor, v: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return contiguous copies of stored rows, `"k"` and `"v"`."""
    return {name: rows.clone(memory_format=torch.contiguous_format) for name, rows in (("k", k), ("v", v))}


def make_meta_state(kind: str, dtype: torch.dtype, seq_len: int, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return what cannot be read off the tensors: the class's name, what it emits, what it saw, its own sizes."""
    return {"type": kind, "version": VERSION, "dtype": dtype_name(dtype), "seq_len": seq_len, **sizes}


def read_state(
    state: Mapping[str, torch.Tensor], meta_state: Mapping[str, Any], kind: str, size_names: Sequence[str]
) -> SavedCache:
    """Check a state that is to become a cache of the class named `kind`, and return what it holds."""
    for name, value in (("state", state), ("meta_state", meta_state)):
        if not isinstance(value, Mapping):
            raise InvalidTypeError(f"{name} is a {type(value).__name__}; expected a dict")
    _check_entries("state", state, {"k", "v"})
    found = meta_state.get("type"), meta_state.get("version")
    if found != (kind, VERSION):
        raise InvalidValueError(f"meta_state has type and version {found}; expected {(kind, VERSION)}")
    _check_entries("meta_state", meta_state, {"type", "version", "dtype", "seq_len", *size_names})
    k = check_tensor("state['k']", state["k"], (None, None, None, None), "(B, Hkv, stored_len, D)").detach()
    v = check_tensor("state['v']", state["v"], (*k.shape[:3], None), "(B, Hkv, stored_len, Dv)", k.device).detach()
    if k.dtype != v.dtype:
        raise InvalidTypeError(f"state['k'] has dtype {k.dtype} and state['v'] {v.dtype}; expected one dtype")
    arguments = {
        "batch_size": k.shape[0],
        "num_heads": k.shape[1],
        "head_dim": k.shape[3],
        "v_head_dim": v.shape[3],
        "dtype": meta_state["dtype"],
        "storage": k.dtype,
        "device": k.device,
        **{name: meta_state[name] for name in size_names},
    }
    return SavedCache(k, v, check_int("meta_state['seq_len']", meta_state["seq_len"], minimum=0), arguments)


def _check_entries(name: str, data: Mapping[str, Any], expected: set[str]) -> None:
    if set(data) != expected:
        raise InvalidValueError(f"{name} has the entries {sorted(map(str, data))}; expected {sorted(expected)}")
