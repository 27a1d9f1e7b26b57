"""The arguments of one attention call, checked once, in the form that every kernel takes."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypedDict

import torch
from torch.autograd import forward_ad

from kvcache.attention.encoded import EncodedStore, Store, decoded_dtype
from kvcache.checks import (
    check_bool,
    check_float,
    check_int,
    check_int_tensor,
    check_on_device,
    check_range,
    check_shape,
    check_tensor,
)
from kvcache.errors import InvalidTypeError, InvalidValueError

K_LETTERS = "(B, Hkv, S, D)", "(num_blocks, Hkv, block_size, D)"  # without a block table and with one
V_LETTERS = "(B, Hkv, S, Dv)", "(num_blocks, Hkv, block_size, Dv)"

LARGEST_SOFTCAP = 1e30  # above it scores differ by nothing from what they were, and float32 would overflow

IntTensorLike = torch.Tensor | Sequence[Any]


class ScoreOptions(TypedDict, total=False):
    """Options of `attend` about scores, which every cache passes on; see there."""

    scale: float | None
    softcap: float | None
    sink_logits: torch.Tensor | None


class CacheOptions(ScoreOptions, total=False):
    """Options of `attend` that a cache of one layer passes on."""

    starts: IntTensorLike | None


class AttentionOptions(CacheOptions, total=False):
    """Options of `attend`."""

    block_table: IntTensorLike | None
    lengths: IntTensorLike | None
    window: int | None
    sinks: int


class AttentionArguments(NamedTuple):
    """What `attend` was asked for: shapes agree, values are in range, None means "not asked for".

    A tuple, because every token makes one in every layer and a frozen dataclass takes five times as long.
    """

    q: torch.Tensor  # (B, H, T, D)
    k: Store  # (B, Hkv, S, D), or blocks (num_blocks, Hkv, block_size, D)
    v: Store  # the same with Dv
    block_table: torch.Tensor | None  # (B, M) int64
    lengths: torch.Tensor | None  # (B,) int64
    starts: torch.Tensor | None  # (B,) int64
    window: int | None
    sinks: int
    scale: float
    softcap: float | None
    sink_logits: torch.Tensor | None  # (H,)
    return_lse: bool
    num_slots: int  # S: how many slots a sequence has, valid or not

    @property
    def needs_gradient(self) -> bool:
        """Whether a gradient flows from the output to an input."""
        if forward_ad._current_level >= 0:  # tangents go their own way, whether gradients are on or not
            return True
        if not torch.is_grad_enabled():
            return False
        tensors = (self.q, self.k, self.v, self.sink_logits)
        return any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors)

    @property
    def compute_dtype(self) -> torch.dtype:
        """float64 if any input is, else float32: 16-bit inputs are computed in float32 and rounded once."""
        dtypes = (self.q.dtype, decoded_dtype(self.k), decoded_dtype(self.v))
        return torch.float64 if torch.float64 in dtypes else torch.float32


def check_arguments(
    q: torch.Tensor,
    k: Store,
    v: Store,
    block_table: IntTensorLike | None,
    lengths: IntTensorLike | None,
    starts: IntTensorLike | None,
    window: int | None,
    sinks: int,
    scale: float | None,
    softcap: float | None,
    sink_logits: torch.Tensor | None,
    return_lse: bool,
) -> AttentionArguments:
    """Check everything `attend` is given but the numbers in tensors; see there for the meaning of each argument."""
    check_tensor("q", q, (None, None, None, None), "(B, H, T, D)")
    batch, heads, _, head_dim = q.shape
    device = q.device
    if head_dim == 0:
        raise InvalidValueError("q has head size D = 0; expected D >= 1")
    paged = block_table is not None
    _check_store("k", k, (None if paged else batch, None, None, head_dim), K_LETTERS[paged], device)
    num_blocks, kv_heads, block_size, _ = k.shape
    _check_store("v", v, (num_blocks, kv_heads, block_size, None), V_LETTERS[paged], device)
    check_head_groups(heads, kv_heads)
    if block_table is not None:
        block_table = check_int_tensor("block_table", block_table, (batch, None), "(B, M)", device)
    if lengths is not None:
        lengths = check_int_tensor("lengths", lengths, (batch,), "(B,)", device)
    if starts is not None:
        starts = check_int_tensor("starts", starts, (batch,), "(B,)", device)
    if window is not None:
        window = check_int("window", window, minimum=1)
    sinks = check_int("sinks", sinks, minimum=0)
    scale, softcap = check_scores(q, scale, softcap, sink_logits)
    check_bool("return_lse", return_lse)
    return attention_arguments(
        q, k, v, block_size, block_table, lengths, starts, window, sinks, scale, softcap, sink_logits, return_lse
    )


def attention_arguments(
    q: torch.Tensor,
    k: Store,
    v: Store,
    block_size: int,  # S where there is no block table
    block_table: torch.Tensor | None,
    lengths: torch.Tensor | None,
    starts: torch.Tensor | None,
    window: int | None,
    sinks: int,
    scale: float,
    softcap: float | None,
    sink_logits: torch.Tensor | None,
    return_lse: bool,
) -> AttentionArguments:
    """Return the arguments of a call, of which each is checked."""
    num_slots = block_size if block_table is None else block_table.shape[1] * block_size
    if window is not None:
        window = min(window, num_slots)  # no more can be seen
    sinks = min(sinks, num_slots)
    return AttentionArguments(
        q, k, v, block_table, lengths, starts, window, sinks, scale, softcap, sink_logits, return_lse, num_slots
    )


def check_scores(
    q: torch.Tensor, scale: float | None, softcap: float | None, sink_logits: torch.Tensor | None
) -> tuple[float, float | None]:
    """Check the options about scores, for queries (B, H, T, D), and return scale and softcap as plain floats."""
    scale = q.shape[3] ** -0.5 if scale is None else check_float("scale", scale)
    if softcap is not None:
        softcap = check_float("softcap", softcap)
        if softcap <= 0:
            raise InvalidValueError(f"softcap is {softcap}; expected a number > 0")
        if softcap > LARGEST_SOFTCAP:
            softcap = None
    if sink_logits is not None:
        check_tensor("sink_logits", sink_logits, (q.shape[1],), "(H,)", q.device)
    return scale, softcap


def check_ranges(arguments: AttentionArguments) -> None:
    """Check the numbers in `lengths` and `starts`, for who does not check them where they are read."""
    if arguments.lengths is not None:
        check_range("lengths", arguments.lengths, 0, arguments.num_slots)
    if arguments.starts is not None:
        check_range("starts", arguments.starts, 0)


def _check_store(name: str, store: Any, shape: Sequence[int | None], letters: str, device: torch.device) -> None:
    if not isinstance(store, EncodedStore):
        check_tensor(name, store, shape, letters, device)
        return
    check_shape(name, tuple(store.shape), shape, letters)
    check_on_device(name, store.device, device)


def check_head_groups(heads: int, kv_heads: int) -> None:
    """Check that the query heads can share the key/value heads evenly."""
    if kv_heads == 0 or heads % kv_heads:
        raise InvalidValueError(
            f"q has {heads} heads and k has {kv_heads}; expected the query heads to be a multiple of the "
            "key/value heads"
        )


def check_parts(
    outputs: Iterable[torch.Tensor], lses: Iterable[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Check the partial results that `merge_attention` is given and return them as lists."""
    for name, parts in (("outputs", outputs), ("lses", lses)):
        if not isinstance(parts, Iterable):
            raise InvalidTypeError(f"{name} is a {type(parts).__name__}; expected a sequence of tensors")
    outputs, lses = list(outputs), list(lses)
    if len(outputs) == 0 or len(outputs) != len(lses):
        raise InvalidValueError(
            f"outputs has {len(outputs)} parts and lses has {len(lses)}; expected as many of each, at least 1"
        )
    first = check_tensor("outputs[0]", outputs[0], (None, None, None, None), "(B, H, T, Dv)")
    for index, (output, lse) in enumerate(zip(outputs, lses, strict=True)):
        check_tensor(f"outputs[{index}]", output, first.shape, "(B, H, T, Dv)", first.device)
        check_tensor(f"lses[{index}]", lse, first.shape[:3], "(B, H, T)", first.device)
        if output.dtype != first.dtype:
            raise InvalidTypeError(f"outputs[{index}] has dtype {output.dtype}; expected {first.dtype}")
    return outputs, lses
