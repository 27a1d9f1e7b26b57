"""What can be told of one tensor: facts that change with it, a sample of its elements, a digest of all its bytes."""

import hashlib
import weakref
from collections.abc import Iterator
from functools import cache
from itertools import count
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from kvcache.errors import InvalidTypeError
from kvcache.prefix.plain import plain_text, type_name

_ROW = 8  # a sample is two rows of elements: from the first on, and up to the last
_CHUNK = 1 << 24  # elements copied at once where a tensor's memory cannot be read in place
_ORDINARY = (torch.Tensor, nn.Parameter)
_name = cache(str)  # of dtypes and devices


class _Serials:
    """A number for each object that lives, never given to another: ids are, once an object is gone."""

    def __init__(self) -> None:
        self._numbers = count()
        self._given: dict[int, tuple[weakref.ref[Any], int]] = {}  # by id; no object is kept alive

    def of(self, thing: Any) -> int:
        given = self._given.get(id(thing))
        if given is not None and given[0]() is thing:
            return given[1]
        return self._give(thing, id(thing), self.new())

    def new(self) -> int:
        """Return a number that nothing has yet."""
        return next(self._numbers)

    def _give(self, thing: Any, key: int, number: int) -> int:
        def forget(gone: "weakref.ref[Any]") -> None:
            if key in self._given and self._given[key][0] is gone:
                del self._given[key]

        self._given[key] = weakref.ref(thing, forget), number
        return number


_serials = _Serials()
serial = _serials.of  # the number of a module or a class


def tensor_serial(tensor: torch.Tensor) -> int:
    """Return the number of a tensor, which stands in it: torch cannot swap tensors that have weak references."""
    owner, number = getattr(tensor, "_kvcache_serial", (None, None))
    if number is None or owner != id(tensor):  # copies take their attributes along
        number = _serials.new()
        tensor._kvcache_serial = id(tensor), number  # type: ignore[attr-defined]
    return number


class _Digest(Protocol):
    def update(self, data: Any, /) -> None: ...


def add_field(digest: _Digest, label: str, data: Any) -> None:
    """Add `data`, bytes or an array of them, to what `digest` is of, with its label and length."""
    _announce(digest, label, len(data))
    digest.update(data)


def _announce(digest: _Digest, label: str, num_bytes: int) -> None:
    name = label.encode()
    digest.update(len(name).to_bytes(8, "little") + name + num_bytes.to_bytes(8, "little"))


def _is_made_of_others(tensor: torch.Tensor) -> bool:
    kind = type(tensor)
    return kind not in _ORDINARY and kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _inner(tensor: torch.Tensor) -> tuple[list[str], object]:
    if _is_made_of_others(tensor) and hasattr(tensor, "__tensor_flatten__"):
        return tensor.__tensor_flatten__()  # type: ignore[no-any-return]
    return [], None


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensor and, where it is of a class made of other tensors, those."""
    if type(tensor) in _ORDINARY:
        return [tensor]
    return [tensor, *(part for name in _inner(tensor)[0] for part in parts_of(getattr(tensor, name)))]


def is_readable(tensor: torch.Tensor) -> bool:
    """Whether the tensor has memory of its own in which its elements can be read in place."""
    return (
        (type(tensor) in _ORDINARY or not (_is_made_of_others(tensor) or is_lazy(tensor)))
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and (tensor.data_ptr() != 0 or tensor.numel() == 0)  # on the meta device, or memory given back as sharding does
    )


def facts_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return which object a readable tensor is, where its elements lie, and its version."""
    return (
        tensor_serial(tensor),
        tensor.data_ptr(),
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        _name(tensor.dtype),
        _name(tensor.device),
        None if tensor.is_inference() else tensor._version,  # inference tensors have none
    )


def facts_there_are(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return as much of this as a tensor has that is not readable."""
    facts: list[Any] = [tensor_serial(tensor)]
    for fact in ("data_ptr", "size", "dtype", "device", "_version"):
        try:
            value = getattr(tensor, fact)
            facts.append(str(value() if callable(value) else value))
        except Exception:  # whatever a subclass may raise; a sparse tensor has no address, a lazy one no shape
            facts.append(None)
    return tuple(facts)


def sample_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return up to 16 elements of a readable tensor that has some, as a view of shape (n, 8)."""
    size = tensor.numel()
    if not tensor.is_contiguous():
        span = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if span > size:  # elements of others lie between
            rows = torch.linspace(0, size - 1, 2 * _ROW, dtype=torch.float64, device="cpu").long().view(2, _ROW)
            return tensor[torch.unravel_index(rows, tensor.shape)]
        size = span
    if size < _ROW:
        return tensor.as_strided((size, _ROW), (1, 0))
    step = max(1, (size - 1) // (2 * _ROW - 1))
    return tensor.as_strided((2, _ROW), (size - 1 - step * (_ROW - 1), step))


def sample_values(group: list[torch.Tensor]) -> Any:
    """Return the bytes of samples that have one dtype and device."""
    try:
        return _memory(torch.cat(group))  # one transfer for all tensors of a dtype on a device
    except NotImplementedError:  # torch cannot copy some dtypes of less than a byte
        return b""


def _memory(tensor: torch.Tensor) -> Any:
    flat = tensor.resolve_conj().resolve_neg().reshape(-1)
    if flat.stride(0) != 1:
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).cpu().numpy()


def bytes_digest(name: str, tensor: torch.Tensor) -> bytes:
    """Return a digest of the dtype, shape and every byte of the tensor, without a copy of it as a whole.

    Raises:
        InvalidTypeError: its bytes cannot be read; the error calls it `name`.
    """
    digest = hashlib.blake2b(digest_size=32)
    inner, settings = _inner(tensor)
    if not inner and not is_readable(tensor):
        raise InvalidTypeError(
            f"model has {name}, a {type_name(tensor)} ({tensor.layout}, {tensor.dtype}, on {tensor.device}) whose "
            "bytes cannot be read; expected dense tensors that are loaded"
        )
    add_field(digest, "dtype", str(tensor.dtype).encode())
    add_field(digest, "shape", repr(list(tensor.shape)).encode())
    for part in inner:
        add_field(digest, f"part {part}", bytes_digest(f"{name}.{part}", getattr(tensor, part)))
    if inner:
        add_field(digest, "settings", plain_text(settings, objects=True).encode())
    else:
        _announce(digest, "bytes", tensor.nbytes)
        for chunk in _chunks(tensor):
            digest.update(_memory(chunk))
    return digest.digest()


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    size = tensor.numel()
    if size <= _CHUNK:
        if size > 0:
            yield tensor
    elif tensor.is_contiguous():
        flat = tensor.view(-1)
        yield from (flat[start : start + _CHUNK] for start in range(0, size, _CHUNK))
    else:
        rows = max(1, _CHUNK * len(tensor) // size)
        for start in range(0, len(tensor), rows):
            yield from _chunks(tensor[start] if rows == 1 else tensor[start : start + rows])
