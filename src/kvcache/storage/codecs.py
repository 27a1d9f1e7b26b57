"""How one row, the key or the value of one token and head, is kept in memory.

    float16 ... float64    D numbers
    int8, int4             bytes:  | offset of each group | step of each group | codes                       |
                                   | 2 bytes, float16     | 2 bytes            | 1 or half a byte a channel  |

Rows are encoded when they are appended, each for itself: in groups of 32 channels (the last one may be shorter) a
value is kept as `offset + code * step`, the offset being the group's smallest value in float16. So rows that come
together or one by one, or again after a rollback, are the same bits, and encoding a decoded row changes nothing.

A step is the 16 bits of a float32 below its sign, which is never set: bfloat16 with one more bit of precision. That
bit makes the largest value's code the largest code, whatever the rounding, so that encoding twice finds the same step;
and float16 would be too coarse for the steps of values below 0.01.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from kvcache.attention.encoded import EncodedStore
from kvcache.checks import FLOATING_DTYPES, dtype_name
from kvcache.errors import InvalidTypeError, InvalidValueError

GROUP_SIZE = 32
_LARGEST_OFFSET = torch.finfo(torch.float16).max
_FLOAT16_EXPONENT = 0x7C00
_FLOAT16_EPS = torch.finfo(torch.float16).eps
_FLOAT16_SMALLEST = 2.0**-24


@dataclass(frozen=True)
class FloatCodec:
    """Rows as numbers of one floating dtype, cast by value."""

    dtype: torch.dtype

    @property
    def name(self) -> str:
        """The dtype's name."""
        return dtype_name(self.dtype)

    def width(self, head_dim: int) -> int:
        """Return how many elements a row of `head_dim` channels takes."""
        return head_dim

    def nbytes(self, head_dim: int) -> int:
        """Return the bytes of a row of `head_dim` channels."""
        return head_dim * self.dtype.itemsize

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows (..., D) of any floating dtype as they are stored (..., D); itself where nothing changes."""
        return rows.to(self.dtype)

    def decode(self, data: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """Return stored rows (..., D) as numbers of `dtype`; itself where nothing changes."""
        return data.to(dtype)

    def readable(self, data: torch.Tensor, head_dim: int) -> torch.Tensor:
        """Return stored rows as `attend` takes them: a plain tensor."""
        return data


@dataclass(frozen=True)
class GroupCodec:
    """Rows as unsigned integers of `bits` bits with an offset and a step for each group of 32 channels.

    A value x becomes `round((x - offset) / step)` with `step = (largest - offset) / (2**bits - 1)`, no finer than
    float16 numbers are at the offset, so that the error is at most half a step. That holds within float16's range:
    values below -65504 are kept as that (-inf too), and groups that lie above 65504 in a coarser grid from there on. A
    group with a NaN or +inf is NaN.

    Source: KIVI (arXiv:2402.02750), section 3.1, asymmetric round-to-nearest; groups along the channels of a token.
    """

    bits: int
    dtype = torch.uint8

    @property
    def name(self) -> str:
        """ "int8" or "int4"."""
        return f"int{self.bits}"

    def width(self, head_dim: int) -> int:
        """Return how many bytes a row of `head_dim` channels takes."""
        return 4 * _num_groups(head_dim) + -(-head_dim * self.bits // 8)

    nbytes = width

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows (..., D) of any floating dtype as bytes (..., width)."""
        groups = _in_groups(rows.float())
        smallest, largest = groups.amin(dim=-1), groups.amax(dim=-1)  # (..., G); aminmax starts threads for one row
        offsets = smallest.clamp(-_LARGEST_OFFSET, _LARGEST_OFFSET).half() + 0  # 0 and not -0
        steps = _step_bits(torch.maximum((largest - offsets.float()) / self._top, _spacing(offsets)))
        offset, step = offsets.float()[..., None], _step_of(steps)[..., None]
        codes = ((groups - offset) / step).round_().clamp_(0, self._top).to(torch.uint8)
        codes = codes.flatten(-2)[..., : rows.shape[-1]]
        parameters = torch.cat([offsets.view(torch.int16), steps], dim=-1).view(torch.uint8)
        return torch.cat([parameters, self._pack(codes)], dim=-1)

    def decode(self, data: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """Return bytes (..., width) as numbers (..., head_dim) of `dtype`, computed in float32."""
        num_groups = _num_groups(head_dim)
        packed = data[..., 4 * num_groups :]
        # A copy: a view as another dtype needs aligned memory.
        parameters = data[..., : 4 * num_groups].clone(memory_format=torch.contiguous_format).view(torch.int16)
        offsets, steps = parameters[..., :num_groups], parameters[..., num_groups:]
        offset, step = offsets.view(torch.float16).float()[..., None], _step_of(steps)[..., None]
        codes = _in_groups(self._unpack(packed, head_dim))
        return (offset + codes * step).flatten(-2)[..., :head_dim].to(dtype)

    def readable(self, data: torch.Tensor, head_dim: int) -> "EncodedRows":
        """Return stored rows as `attend` takes them."""
        return EncodedRows(self, data, head_dim)

    @property
    def _top(self) -> int:
        return (1 << self.bits) - 1

    def _pack(self, codes: torch.Tensor) -> torch.Tensor:
        """Put two 4-bit codes in a byte: channel 2i in the lower half, 2i + 1 in the upper."""
        if self.bits == 8:
            return codes
        low, high = codes[..., ::2].contiguous(), codes[..., 1::2]
        low[..., : high.shape[-1]] |= high << 4
        return low

    def _unpack(self, packed: torch.Tensor, head_dim: int) -> torch.Tensor:
        if self.bits == 8:
            return packed
        return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)[..., :head_dim]


Codec = FloatCodec | GroupCodec

CODECS: dict[str, Codec] = {
    **{dtype_name(dtype): FloatCodec(dtype) for dtype in FLOATING_DTYPES},
    **{codec.name: codec for codec in (GroupCodec(8), GroupCodec(4))},
}


@dataclass(frozen=True)
class EncodedRows(EncodedStore):
    """Encoded keys or values, which `attend` takes like a tensor (num_blocks or B, Hkv, block_size or S, head_dim).

    What the caches of int8 and int4 rows hand to `attend`; made by `GroupCodec.readable`.

    Raises:
        InvalidValueError, InvalidTypeError: `data` is not what the codec keeps for `head_dim` channels.
    """

    codec: GroupCodec
    data: torch.Tensor  # (N, Hkv, S, width) bytes
    head_dim: int

    def __post_init__(self) -> None:
        width = self.codec.width(self.head_dim)
        if self.data.shape[-1] != width:  # a kernel would read past the end of a row
            raise InvalidValueError(
                f"data has {self.data.shape[-1]} bytes a row; expected {width}, which {self.codec.name} takes for "
                f"head_dim = {self.head_dim}"
            )
        if self.data.dtype != self.codec.dtype:
            raise InvalidTypeError(f"data has dtype {dtype_name(self.data.dtype)}; expected uint8")

    @property
    def codec_name(self) -> str:
        """The codec's name."""
        return self.codec.name

    def with_data(self, data: torch.Tensor) -> Self:
        """Return other rows of the same kind."""
        return type(self)(self.codec, data, self.head_dim)

    def decode(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the rows as numbers of `dtype`."""
        return self.codec.decode(self.data, self.head_dim, dtype)


@dataclass(frozen=True)
class Storage:
    """How keys and how values are kept."""

    k: Codec
    v: Codec

    @property
    def name(self) -> str:
        """One codec's name, or the keys' and the values', as in "int8/int4"."""
        return self.k.name if self.k == self.v else f"{self.k.name}/{self.v.name}"


StorageLike = torch.dtype | str | Sequence[torch.dtype | str] | Storage


def check_storage(name: str, value: Any) -> Storage:
    """Return the storage that `value` names: a codec's name or a floating dtype, "keys/values", or a pair of those."""
    if isinstance(value, Storage):
        return value
    parts = value.split("/") if isinstance(value, str) else value
    if not isinstance(parts, (tuple, list)):
        parts = [parts]
    if not 1 <= len(parts) <= 2:
        raise InvalidValueError(f"{name} is {value!r}; expected one entry, or one for the keys and one for the values")
    codecs = [_check_codec(name, value, part) for part in parts]
    return Storage(codecs[0], codecs[-1])


def _check_codec(name: str, value: Any, part: Any) -> Codec:
    codec = CODECS.get(dtype_name(part) if isinstance(part, torch.dtype) else part) if _is_name(part) else None
    if codec is None:
        expected = ", ".join(CODECS)
        error = InvalidValueError if _is_name(part) else InvalidTypeError
        raise error(f"{name} is {value!r}; expected one of {expected}, or two as in 'int8/int4' for keys and values")
    return codec


def _is_name(part: Any) -> bool:
    return isinstance(part, (str, torch.dtype))


def _num_groups(head_dim: int) -> int:
    return -(-head_dim // GROUP_SIZE)


def _in_groups(rows: torch.Tensor) -> torch.Tensor:
    """Return rows (..., D) as (..., G, 32), the last channel repeated as often as the last group lacks some."""
    if missing := -rows.shape[-1] % GROUP_SIZE:
        rows = torch.cat([rows, rows[..., -1:].expand(*rows.shape[:-1], missing)], dim=-1)
    return rows.contiguous().view(*rows.shape[:-1], rows.shape[-1] // GROUP_SIZE, GROUP_SIZE)


def _spacing(offsets: torch.Tensor) -> torch.Tensor:
    """Return how far apart float16 numbers are at `offsets`: with a step this large, rounding them shifts no code."""
    powers = (offsets.view(torch.int16) & _FLOAT16_EXPONENT).view(torch.float16).float()
    return (powers * _FLOAT16_EPS).clamp_(min=_FLOAT16_SMALLEST)


def _step_bits(steps: torch.Tensor) -> torch.Tensor:
    """Return positive float32 numbers as the 16 bits below their sign, rounded, in an int16 tensor."""
    return ((steps.view(torch.int32) + 0x4000) >> 15).to(torch.int16)


def _step_of(bits: torch.Tensor) -> torch.Tensor:
    return ((bits.to(torch.int32) & 0xFFFF) << 15).view(torch.float32)
