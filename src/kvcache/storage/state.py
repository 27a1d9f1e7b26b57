"""A cache as data that can be saved: its stored rows, and plain strings and ints; and a cache from them again."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from kvcache.checks import check_int, check_tensor, dtype_name
from kvcache.errors import InvalidTypeError, InvalidValueError

if TYPE_CHECKING:
    from kvcache.storage.layer import LayerCache

VERSION = 1

AnyCache = TypeVar("AnyCache", bound="LayerCache")


def state_of(cache: "LayerCache") -> dict[str, torch.Tensor]:
    """Return contiguous copies of the stored rows, `"k"` and `"v"`."""
    k, v = cache.stored_rows()
    return {name: rows.clone(memory_format=torch.contiguous_format) for name, rows in (("k", k), ("v", v))}


def meta_state_of(cache: "LayerCache") -> dict[str, Any]:
    """Return what cannot be read off the tensors of `state_of`."""
    return {
        "type": type(cache).__name__,
        "version": VERSION,
        "dtype": dtype_name(cache.dtype),
        "seq_len": cache.seq_len,
        **cache.sizes,
    }


def cache_from_state(cls: type[AnyCache], state: Mapping[str, torch.Tensor], meta_state: Mapping[str, Any]) -> AnyCache:
    """Return a new cache of class `cls`, on the device of the tensors, with the content that they describe."""
    for name, value in (("state", state), ("meta_state", meta_state)):
        if not isinstance(value, Mapping):
            raise InvalidTypeError(f"{name} is a {type(value).__name__}; expected a dict")
    _check_entries("state", state, {"k", "v"})
    kind = meta_state.get("type"), meta_state.get("version")
    if kind != (cls.__name__, VERSION):
        raise InvalidValueError(f"meta_state has type and version {kind}; expected {(cls.__name__, VERSION)}")
    _check_entries("meta_state", meta_state, {"type", "version", "dtype", "seq_len", *cls.size_names})
    k = check_tensor("state['k']", state["k"], (None, None, None, None), "(B, Hkv, stored_len, D)")
    v = check_tensor("state['v']", state["v"], (*k.shape[:3], None), "(B, Hkv, stored_len, Dv)", k.device)
    if k.dtype != v.dtype:
        raise InvalidTypeError(f"state['k'] has dtype {k.dtype} and state['v'] {v.dtype}; expected one dtype")
    seq_len = check_int("meta_state['seq_len']", meta_state["seq_len"], minimum=0)
    constructor: Any = cls
    cache: AnyCache = constructor(
        batch_size=k.shape[0],
        num_heads=k.shape[1],
        head_dim=k.shape[3],
        v_head_dim=v.shape[3],
        dtype=meta_state["dtype"],
        storage=k.dtype,
        device=k.device,
        **{name: meta_state[name] for name in cls.size_names},
    )
    with torch.no_grad():
        cache.restore(k.detach(), v.detach(), seq_len)
    return cache


def _check_entries(name: str, data: Mapping[str, Any], expected: set[str]) -> None:
    if set(data) != expected:
        raise InvalidValueError(f"{name} has the entries {sorted(map(str, data))}; expected {sorted(expected)}")
