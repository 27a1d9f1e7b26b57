"""A cache as data that can be saved, its stored rows and plain strings and ints, and the checks on the way back."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kvcache.checks import check_int, check_shape, dtype_name
from kvcache.errors import InvalidTypeError, InvalidValueError
from kvcache.storage.codecs import check_storage

VERSION = 2


class SavedCache(NamedTuple):
    """What a state holds, checked: rows for `_restore`, and the arguments of the constructor before it."""

    k: torch.Tensor  # (B, Hkv, stored_len, width)
    v: torch.Tensor
    seq_len: int
    arguments: dict[str, Any]


def make_state(k: torch.Tensor, v: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return contiguous copies of stored rows, `"k"` and `"v"`."""
    return {name: rows.clone(memory_format=torch.contiguous_format) for name, rows in (("k", k), ("v", v))}


def make_meta_state(
    kind: str,
    dtype: torch.dtype,
    storage: str,
    head_dims: tuple[int, int],
    seq_len: int,
    sizes: Mapping[str, int | None],
) -> dict[str, Any]:
    """Return what cannot be read off the tensors: the class's name, what it emits and keeps, what it saw, its sizes."""
    return {
        "type": kind,
        "version": VERSION,
        "dtype": dtype_name(dtype),
        "storage": storage,
        "head_dim": head_dims[0],
        "v_head_dim": head_dims[1],
        "seq_len": seq_len,
        **sizes,
    }


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
    sizes = {"head_dim", "v_head_dim", *size_names}
    _check_entries("meta_state", meta_state, {"type", "version", "dtype", "storage", "seq_len", *sizes})
    storage = check_storage("meta_state['storage']", meta_state["storage"])
    head_dims = (check_int(f"meta_state['{name}']", meta_state[name], minimum=1) for name in ("head_dim", "v_head_dim"))
    k_width, v_width = (codec.width(size) for codec, size in zip((storage.k, storage.v), head_dims, strict=True))
    k = _check_rows("state['k']", state["k"], storage.k.dtype, (None, None, None, k_width))
    v = _check_rows("state['v']", state["v"], storage.v.dtype, (*k.shape[:3], v_width))
    if k.device != v.device:
        raise InvalidValueError(f"state['v'] is on {v.device}; expected {k.device}, where state['k'] is")
    arguments = {
        "batch_size": k.shape[0],
        "num_heads": k.shape[1],
        "dtype": meta_state["dtype"],
        "storage": storage,
        "device": k.device,
        **{name: meta_state[name] for name in sizes},
    }
    return SavedCache(k, v, check_int("meta_state['seq_len']", meta_state["seq_len"], minimum=0), arguments)


def _check_rows(name: str, rows: Any, dtype: torch.dtype, shape: Sequence[int | None]) -> torch.Tensor:
    if not isinstance(rows, torch.Tensor):
        raise InvalidTypeError(f"{name} is a {type(rows).__name__}; expected a torch.Tensor")
    check_shape(name, tuple(rows.shape), shape, "(B, Hkv, stored_len, width)")
    if rows.dtype != dtype:
        raise InvalidTypeError(f"{name} has dtype {dtype_name(rows.dtype)}; expected {dtype_name(dtype)}")
    return rows.detach()


def _check_entries(name: str, data: Mapping[str, Any], expected: set[str]) -> None:
    if set(data) != expected:
        raise InvalidValueError(f"{name} has the entries {sorted(map(str, data))}; expected {sorted(expected)}")
