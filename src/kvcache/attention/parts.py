"""Attention on a CPU in parts that need no mask of all queries times all keys, merged by their log-sum-exp.

T queries at the end of n slots are two parts: the past, which all of them see, without a mask, and the T x T diagonal
with SDPA's causal flag. With a window the queries go in pieces, each of which reads only slots that it sees:

    slots          s s . . . . . . . . . . . .     s: sinks
    first piece    + +   / + + / / /               +: seen by all queries of the piece
    second piece   + +         / + + / / /         /: the edges of their windows, in a small mask
"""

import warnings
from collections.abc import Iterator
from functools import cache
from itertools import groupby

import torch
from torch.nn.functional import pad

from kvcache.attention.arguments import AttentionArguments
from kvcache.attention.gather import read_slots
from kvcache.attention.visibility import visible_slots

PIECE = 256  # queries of one piece under a window: fastest of 128 to 1024 for windows of 512 to 4096
# What PyTorch's SDPA calls on a CPU; it also returns the log-sum-exp. Not a part of PyTorch's public interface.
FLASH = "_scaled_dot_product_flash_attention_for_cpu"

Part = tuple[torch.Tensor, torch.Tensor]  # the output (B, Hkv, G, T, D) over some keys, the log-sum-exp (B, Hkv, G, T)


@cache
def has_flash() -> bool:
    """Whether this PyTorch has the kernel that `attention_by_parts` needs; warns once if not."""
    known = hasattr(torch.ops.aten, FLASH)
    if not known:
        warnings.warn(
            f"PyTorch {torch.__version__} has no {FLASH}: attention on the CPU is right without it, but slow, "
            "over a past, block tables and windows with sinks above all; PyTorch 2.13 has it",
            stacklevel=2,
        )
    return known


def attention_by_parts(arguments: AttentionArguments, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output (B, H, T, Dv) and the log-sum-exp (B, H, T), neither with a gradient.

    Args:
        arguments: on a CPU, with a scale above 0 and no softcap.
        dtype: what queries, keys and values are given to the kernel in; it sums in float32 at least in any case.

    Raises:
        InvalidValueError: an entry of the block table that is needed is not a block of the store.
    """
    parts = [_equal_rows_attention(arguments, *equal, dtype) for equal in _equal_rows(arguments)]
    output, lse = parts[0] if len(parts) == 1 else (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    if arguments.sink_logits is not None:
        output, lse = _with_sink_logits(output, lse, arguments.sink_logits)
    return output, lse


def _equal_rows(arguments: AttentionArguments) -> Iterator[tuple[slice, int, int]]:
    """Yield sequences, as a slice of the batch, that have the same start and length, with these."""
    batch = arguments.q.shape[0]
    starts = [0] * batch if arguments.starts is None else arguments.starts.tolist()
    lengths = [arguments.num_slots] * batch if arguments.lengths is None else arguments.lengths.tolist()
    first = 0
    for (start, length), equal in groupby(zip(starts, lengths, strict=True)):
        last = first + len(list(equal))
        yield slice(first, last), start, length
        first = last
    if batch == 0:
        yield slice(0, 0), 0, 0


def _equal_rows_attention(
    arguments: AttentionArguments, rows: slice, start: int, length: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output (B, H, T, Dv) and log-sum-exp of sequences that see no slots but those from start to length."""
    heads, num_queries = arguments.q.shape[1:3]
    batch = rows.stop - rows.start
    kv_heads, v_head_dim = arguments.v.shape[1], arguments.v.shape[3]
    seeing = max(0, min(num_queries, length - start))
    blind = num_queries - seeing  # the first queries see nothing
    q = arguments.q[rows, :, blind:].to(dtype)
    if q.numel() == 0:
        lse = q.new_full((batch, heads, num_queries), float("-inf"), dtype=arguments.compute_dtype)
        return q.new_zeros(batch, heads, num_queries, v_head_dim), lse

    def read(first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        slots = slice(start + first, start + last)
        k, v = (read_slots(x, arguments.block_table, rows, slots, dtype) for x in (arguments.k, arguments.v))
        return _kernel_input(k, width), _kernel_input(v, width)

    # Where keys and values differ in size, channels of zeros add nothing to a score.
    width = max(arguments.k.shape[3], v_head_dim)
    q = _kernel_input(q, width).view(batch, kv_heads, -1, seeing, width)  # query head h reads key/value head h // G
    num_slots, window, sinks = length - start, arguments.window, arguments.sinks
    if window is None or window + sinks >= num_slots:
        part = _causal(q, *read(0, num_slots), arguments.scale)
    else:
        first = num_slots - seeing - window + 1  # of the slots that are in a query's window
        rest = read(first if first > sinks else 0, num_slots)
        part = _windowed(q, rest, read(0, sinks) if sinks else None, num_slots, window, arguments.scale)

    output, lse = part[0].flatten(1, 2)[..., :v_head_dim], part[1].flatten(1, 2)
    if blind:
        output, lse = pad(output, (0, 0, blind, 0)), pad(lse, (blind, 0), value=float("-inf"))
    return output, lse


def _kernel_input(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """Return (..., width) with rows side by side; the kernel gives garbage for channels with a stride of their own."""
    if tensor.shape[-1] < width:
        tensor = pad(tensor, (0, width - tensor.shape[-1]))  # which keeps the layout, whatever it is
    side_by_side = tensor.stride(-1) == 1 and tensor.stride(-2) >= width
    return tensor if side_by_side else tensor.clone(memory_format=torch.contiguous_format)


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Part:
    """Attend the last T of n slots (B, Hkv, n, D), each query over all slots up to its own."""
    num_queries = q.shape[3]
    past = k.shape[2] - num_queries
    if num_queries == 1:
        return _unmasked(q, k, v, scale)
    diagonal = _each_head(q, k[:, :, past:], v[:, :, past:], scale, is_causal=True)
    return _merged(diagonal, _unmasked(q, k[:, :, :past], v[:, :, :past], scale)) if past else diagonal


def _windowed(
    q: torch.Tensor,
    rest: tuple[torch.Tensor, torch.Tensor],
    sink_rows: tuple[torch.Tensor, torch.Tensor] | None,
    num_slots: int,
    window: int,
    scale: float,
) -> Part:
    """Attend the last T of n slots, each query over its window and the sinks, the first slots of all.

    `rest` holds the keys and values of the last slots, as many as are in any query's window, or all of them.
    """
    k, v = rest
    num_queries = q.shape[3]
    num_sinks = 0 if sink_rows is None else sink_rows[0].shape[2]
    dropped = num_slots - k.shape[2]  # slots before those that `rest` holds
    parts = []
    mask_of: tuple[int, int, bool] | None = None
    for start in range(0, num_queries, PIECE):
        piece = q[:, :, :, start : start + PIECE]
        size = piece.shape[3]
        end = num_slots - num_queries + start + size  # the slot after the piece's last query
        first = end - size - window + 1  # the first slot in the window of the piece's first query
        apart = first > num_sinks  # else the sinks are read with the window
        first = first if apart else 0
        seen = slice(first - dropped, end - dropped)
        if end <= window + num_sinks:
            part = _causal(piece, k[:, :, seen], v[:, :, seen], scale)
        elif size == 1:
            part = _unmasked(piece, k[:, :, seen], v[:, :, seen], scale)
        else:
            if mask_of != (size, end - first, apart):  # once for all pieces but the first and last ones
                mask_of = size, end - first, apart
                visible = visible_slots(size, end - first, window=window, sinks=0 if apart else num_sinks)[0]
                mask = q.new_zeros(visible.shape).masked_fill(~visible, float("-inf"))
            part = _each_head(piece, k[:, :, seen], v[:, :, seen], scale, mask=mask)
        if sink_rows is not None and apart:
            part = _merged(part, _unmasked(piece, *sink_rows, scale))
        parts.append(part)
    if len(parts) == 1:
        return parts[0]
    outputs, lses = zip(*parts, strict=True)
    return torch.cat(outputs, dim=3), torch.cat(lses, dim=3)


def _unmasked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Part:
    """Attend every query over all of the keys.

    The query heads of a group are rows of one problem, so that it reads each key/value head once: twice as fast for
    few queries, and no slower for many.
    """
    rows = _kernel_input(q.flatten(2, 3), q.shape[4])
    output, lse = _flash(rows, k, v, scale)
    return output.view(q.shape), lse.view(q.shape[:4])


def _each_head(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    is_causal: bool = False,
    mask: torch.Tensor | None = None,
) -> Part:
    """Attend with a mask (T, n), -inf where a query does not see a key, or a causal one where T = n."""
    output, lse = _flash(q.flatten(1, 2), k, v, scale, is_causal, mask)
    return output.view(q.shape), lse.view(q.shape[:4])


def _merged(first: Part, second: Part) -> Part:
    """Merge as `merge_attention` does, in one pass; every query sees keys in both parts, so neither sum is -inf."""
    dtype = first[1].dtype
    weight = torch.sigmoid(second[1] - first[1])[..., None]  # of the second part
    return first[0].to(dtype).lerp_(second[0].to(dtype), weight), torch.logaddexp(first[1], second[1])


def _flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    is_causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output (B, H, T, D) and log-sum-exp (B, H, T) over k and v (B, Hkv, n, D), none of them empty."""
    output, lse = getattr(torch.ops.aten, FLASH)(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)
    return output, lse


def _with_sink_logits(
    output: torch.Tensor, lse: torch.Tensor, sink_logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = sink_logits.to(lse.dtype)[:, None]
    kept = torch.sigmoid(lse - logits).masked_fill(lse == float("-inf"), 0.0)  # for queries that see nothing
    return output * kept[..., None], torch.logaddexp(lse, logits)
