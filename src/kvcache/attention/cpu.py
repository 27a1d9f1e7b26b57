"""The native CPU kernel's side in Python: when it serves a call, and the call itself.

The kernel reads keys and values once, straight from where they are stored, for a few queries at a time. It takes
pointers, so an eager call goes to it directly; under `torch.compile` the same call is one operation of the graph.
"""

import torch

from kvcache import native
from kvcache.attention.arguments import AttentionArguments
from kvcache.attention.encoded import Store, stored_data
from kvcache.errors import InvalidValueError

FEW_QUERIES = 8  # that share one reading of the keys and values
LARGEST_HEAD_DIM = 512
BEST = -1  # of native.kernels.INSTRUCTION_SETS


def kernel_applies(arguments: AttentionArguments) -> bool:
    """Whether the kernel serves these arguments, and PyTorch does not serve them faster."""
    q, k, v = arguments.q, stored_data(arguments.k), stored_data(arguments.v)
    fits = (
        q.device.type == "cpu"
        and q.dtype in native.FORMATS
        and _format(arguments.k) is not None
        and _format(arguments.v) is not None
        and max(arguments.k.shape[3], arguments.v.shape[3]) <= LARGEST_HEAD_DIM
        and (arguments.q.shape[2] <= FEW_QUERIES or arguments.softcap is not None)
        and q.numel() > 0
        and v.shape[3] > 0
        and not arguments.needs_gradient
        and _have_memory(q, k, v)
    )
    if fits and native.kernels is None:
        native.warn_that_kernels_are_missing()
    return fits and native.kernels is not None


def kernel_attention(arguments: AttentionArguments) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the output (B, H, T, Dv) in q's dtype and, where it is asked for, the log-sum-exp (B, H, T) in float32.

    Raises:
        InvalidValueError: `lengths`, `starts`, or an entry of the block table that is needed, is out of range.
    """
    k, v = arguments.k, arguments.v
    call = _attend_in_graph if torch.compiler.is_compiling() else _attend
    output, lse = call(
        arguments.q,
        stored_data(k),
        stored_data(v),
        _format(k),
        _format(v),
        k.shape[3],
        v.shape[3],
        arguments.block_table,
        arguments.lengths,
        arguments.starts,
        arguments.window,
        arguments.sinks,
        arguments.scale,
        arguments.softcap,
        arguments.sink_logits,
        arguments.return_lse,
    )
    return output, lse if arguments.return_lse else None


def _format(store: Store) -> int | None:
    return native.FORMATS.get(store.dtype if isinstance(store, torch.Tensor) else store.codec_name)


def _have_memory(*tensors: torch.Tensor) -> bool:
    """Whether these are plain tensors: not those of other modes and transforms, such as vmap, that have no address."""
    if torch.compiler.is_compiling():
        return True
    plain = all(type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter for tensor in tensors)
    return plain and torch._C._functorch.peek_interpreter_stack() is None


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_format: int,
    v_format: int,
    head_dim: int,
    v_head_dim: int,
    block_table: torch.Tensor | None,
    lengths: torch.Tensor | None,
    starts: torch.Tensor | None,
    window: int | None,
    sinks: int,
    scale: float,
    softcap: float | None,
    sink_logits: torch.Tensor | None,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = (rows if rows.stride(3) == 1 else rows.contiguous() for rows in (q, k, v))
    batch, heads, queries, _ = q.shape
    num_blocks, kv_heads, block_size, _ = k.shape
    output, lse = _results(q, v_head_dim, return_lse)
    num_slots, table, table_stride = block_size, 0, 0
    if block_table is not None:
        block_table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
        num_slots, table, table_stride = block_table.shape[1] * block_size, block_table.data_ptr(), block_table.stride(0)
    if sink_logits is not None:
        sink_logits = sink_logits.detach().to(torch.float32).contiguous()
    lengths, starts = _contiguous(lengths), _contiguous(starts)
    k_item, v_item = k.element_size(), v.element_size()
    k_block, k_head, k_row, _ = k.stride()
    v_block, v_head, v_row, _ = v.stride()
    assert native.kernels is not None
    try:
        native.kernels.attend(
            BEST,
            q.data_ptr(),
            native.FORMATS[q.dtype],
            *q.stride()[:3],
            *(k.data_ptr(), k_format, head_dim, k_block * k_item, k_head * k_item, k_row * k_item),
            *(v.data_ptr(), v_format, v_head_dim, v_block * v_item, v_head * v_item, v_row * v_item),
            *(batch, heads, kv_heads, queries, block_size, num_blocks, num_slots, table, table_stride),
            0 if lengths is None else lengths.data_ptr(),
            0 if starts is None else starts.data_ptr(),
            0 if window is None else window,
            sinks,
            scale,
            0.0 if softcap is None else softcap,
            0 if sink_logits is None else sink_logits.data_ptr(),
            output.data_ptr(),
            *output.stride()[:3],
            lse.data_ptr(),
            *lse.stride(),
            torch.get_num_threads(),
        )
    except IndexError as error:
        raise InvalidValueError(str(error)) from None
    return output, lse


def _results(q: torch.Tensor, v_head_dim: int, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for the output and the log-sum-exp, which is empty where nobody asks for it."""
    batch, heads, queries, _ = q.shape
    output = torch.empty(batch, heads, queries, v_head_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch if return_lse else 0, heads, queries, dtype=torch.float32, device=q.device)
    return output, lse


def _contiguous(numbers: torch.Tensor | None) -> torch.Tensor | None:
    return None if numbers is None else numbers.contiguous()


_attend_in_graph = torch.library.custom_op("kvcache::attend", _attend, mutates_args=())


@_attend_in_graph.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: object) -> tuple[torch.Tensor, torch.Tensor]:
    v_head_dim, return_lse = options[3], options[-1]
    assert isinstance(return_lse, bool)
    return _results(q, v_head_dim, return_lse)  # type: ignore[arg-type]  # a size, which may be symbolic
