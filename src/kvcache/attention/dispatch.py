"""`attend`: checks what it is given and picks the kernel that computes it."""

from typing import Literal, Unpack, overload

import torch

from kvcache.attention.arguments import (
    AttentionArguments,
    AttentionOptions,
    IntTensorLike,
    check_arguments,
    check_ranges,
)
from kvcache.attention.cpu import kernel_attention
from kvcache.attention.encoded import Store
from kvcache.attention.reference import reference_attention
from kvcache.attention.sdpa import sdpa_applies, sdpa_attention
from kvcache.precision import without_autocast


@overload
def attend(
    q: torch.Tensor,
    k: Store,
    v: Store,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[AttentionOptions],
) -> torch.Tensor: ...
@overload
def attend(
    q: torch.Tensor,
    k: Store,
    v: Store,
    *,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def attend(
    q: torch.Tensor,
    k: Store,
    v: Store,
    *,
    return_lse: bool,
    **options: Unpack[AttentionOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
def attend(
    q: torch.Tensor,
    k: Store,
    v: Store,
    *,
    block_table: IntTensorLike | None = None,
    lengths: IntTensorLike | None = None,
    starts: IntTensorLike | None = None,
    window: int | None = None,
    sinks: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend the newest T tokens of each sequence over all of its stored tokens, themselves included.

    Query t of sequence b sits at slot `lengths[b] - T + t` and sees the slots up to and including its own
    (bottom-right alignment): a single query sees everything, and a chunk continues where the last one ended.
    Each query head h reads key/value head `h // (H // Hkv)`.

    Args:
        q: queries (B, H, T, D), floating point.
        k: keys (B, Hkv, S, D), row b for sequence b; with `block_table`, block storage
            (num_blocks, Hkv, block_size, D). H is a multiple of Hkv. The dtype may differ from q's. Encoded rows
            (`kvcache.storage.EncodedRows`) are decoded as they are read.
        v: values, like k with a head size Dv of their own.
        block_table: (B, M) integers. Slot j of sequence b is row `j % block_size` of block
            `block_table[b, j // block_size]`. Entries that no visible slot needs are ignored (-1 included).
        lengths: (B,) integers, how many slots of each sequence are valid; default S (with a table,
            M * block_size). Fewer than T is allowed: the first queries then see nothing.
        starts: (B,) integers, the first slot of each sequence that may be seen (left padding); default 0.
        window: each query sees only its last `window` slots, itself included.
        sinks: with `window`, the first `sinks` slots from `starts[b]` on stay visible too.
        scale: what scores are multiplied with; default 1 / sqrt(D).
        softcap: scores become `softcap * tanh(scores / softcap)`.
        sink_logits: (H,), one more logit a head that joins the softmax's denominator and has no value.
        return_lse: also return the natural log-sum-exp of each query's scores, sink logits included.

    Returns:
        The output (B, H, T, Dv) in q's dtype, accumulated in float32 (float64 if any input is float64). A query
        that sees nothing gives zeros. With `return_lse` a pair of it and the log-sum-exp (B, H, T), float32
        (float64), which is -inf where nothing is seen and there are no sink logits. Slots that no query sees are
        never read into the result, whatever they hold. The result is differentiable where inputs require it.

    On a CPU the native kernel serves up to 4096 new tokens, with softcap any number, with D and Dv up to 512, and reads
    keys and values once for 32 of them, as they are stored (a store whose channels do not lie side by side is copied
    first). More tokens, float64, and bfloat16 where the CPU multiplies matrices of it (AMX), go through PyTorch's SDPA
    in parts that need no mask of T x S. Gradients and other devices:
    SDPA where its options suffice, else plain operations, more slowly; float64 with softcap too.

    Raises:
        InvalidValueError: a shape, size, device or value does not fit; the message names the argument.
        InvalidTypeError: an argument of the wrong type or kind of dtype.

    >>> k = torch.zeros(1, 1, 4, 1)
    >>> v = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 4, 1)
    >>> attend(torch.ones(1, 1, 2, 1), k, v).flatten()  # the mean of what each of the last two tokens sees
    tensor([2.0000, 2.5000])
    """
    arguments = check_arguments(
        q, k, v, block_table, lengths, starts, window, sinks, scale, softcap, sink_logits, return_lse
    )
    output, lse = checked_attention(arguments)
    return output if lse is None or not return_lse else (output, lse)


def checked_attention(arguments: AttentionArguments) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the output and, where it is asked for, the log-sum-exp, of arguments that are checked already."""
    result = kernel_attention(arguments)
    if result is not None:
        return result
    check_ranges(arguments)
    with without_autocast(arguments.q.device):
        if sdpa_applies(arguments):
            return sdpa_attention(arguments)
        return reference_attention(arguments)
