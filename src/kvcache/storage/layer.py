"""What every cache of one layer has in common: its blocks of rows, checks, operations on the batch.

A cache class decides which rows stay stored and where. Everything else stands here once, so that the same client
code runs over every class. Each operation checks everything before it changes anything.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Self, Unpack, overload

import torch

from kvcache.attention import attend
from kvcache.attention.arguments import (
    CacheOptions,
    IntTensorLike,
    attention_arguments,
    check_head_groups,
    check_scores,
)
from kvcache.attention.dispatch import checked_attention
from kvcache.attention.encoded import Store, copied
from kvcache.checks import (
    check_bool,
    check_device,
    check_dtype,
    check_float,
    check_int,
    check_int_tensor,
    check_range,
    check_tensor,
    check_up_to_seq_len,
    dtype_name,
)
from kvcache.errors import CacheFullError, InvalidValueError, RollbackError
from kvcache.storage.blocks import BlockStore
from kvcache.storage.codecs import StorageLike, check_storage
from kvcache.storage.specs import LayerSpec
from kvcache.storage.state import make_meta_state, make_state, read_state


class VisibleRows(NamedTuple):
    """What the last T queries attend over: arguments of `attend`."""

    k: Store  # (B, Hkv, S, D), or blocks (num_blocks, Hkv, block_size, D)
    v: Store
    starts: torch.Tensor | None = None  # (B,), in slots of k
    window: int | None = None
    sinks: int = 0
    block_table: torch.Tensor | None = None  # (B, M) int64
    lengths: torch.Tensor | None = None  # (B,) int64


class LayerCache(ABC):
    """The keys and values of one layer; see `KVCache`, `SlidingWindowCache` and `PagedCache`."""

    size_names: ClassVar[tuple[str, ...]]
    """The constructor's sizes that the stored rows' shapes do not tell."""

    window: int | None = None  # a query sees its last `window` tokens and the first `sinks`; None: all
    sinks: int = 0

    def __init__(
        self,
        batch_size: int,
        num_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype | str,
        device: torch.device | str,
        v_head_dim: int | None,
        storage: StorageLike | None,
        num_blocks: int | None = None,  # None: one a sequence
    ) -> None:
        batch_size = check_int("batch_size", batch_size, minimum=1)
        layer = LayerSpec(num_heads, head_dim, v_head_dim, self.window, self.sinks)
        self._dtype = check_dtype("dtype", dtype)
        kept = check_storage("storage", self._dtype if storage is None else storage)
        num_blocks = batch_size if num_blocks is None else num_blocks
        self._store = BlockStore(layer, num_blocks, block_size, kept, check_device("device", device))
        self._seq_len = 0

    @property
    def k_cache(self) -> torch.Tensor:
        """The buffer of the keys (B, Hkv, rows, D) as they are stored; for int8 and int4 a row's bytes instead of D."""
        return self._store.k

    @property
    def v_cache(self) -> torch.Tensor:
        """The buffer of the values (B, Hkv, rows, Dv), as `k_cache`."""
        return self._store.v

    @property
    def batch_size(self) -> int:
        """Rows of the batch, B."""
        return self._store.num_blocks  # one a sequence, if a class does not say otherwise

    @property
    def num_heads(self) -> int:
        """Key/value heads, Hkv."""
        return self._store.layer.num_heads

    @property
    def head_dim(self) -> int:
        """Head size of the keys, D."""
        return self._store.layer.head_dims[0]

    @property
    def v_head_dim(self) -> int:
        """Head size of the values, Dv."""
        return self._store.layer.head_dims[1]

    @property
    def sizes(self) -> dict[str, int | None]:
        """The constructor's sizes that the stored rows' shapes do not tell, by name."""
        return {name: getattr(self, name) for name in self.size_names}

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the keys and values that come out."""
        return self._dtype

    @property
    def storage(self) -> str:
        """How rows are kept: a name, or the keys' and the values', as in "int8/int4"."""
        return self._store.storage.name

    @property
    def device(self) -> torch.device:
        """Device of the buffers."""
        return self._store.device

    @property
    def nbytes(self) -> int:
        """Bytes of both buffers, used rows and free ones."""
        return self._store.nbytes

    @property
    def token_nbytes(self) -> int:
        """Bytes that one token's row takes, over the whole batch."""
        return self.batch_size * self._store.layer.token_nbytes(self._store.storage)

    @property
    def stored_nbytes(self) -> int:
        """Bytes of the rows that hold tokens."""
        return self.stored_len * self.token_nbytes

    @property
    def seq_len(self) -> int:
        """Tokens seen so far, which is the position of the next one."""
        return self._seq_len

    def get_seq_len(self) -> int:
        """Return `seq_len`."""
        return self._seq_len

    @property
    def stored_len(self) -> int:
        """Tokens whose rows are still stored: all of them, without a window."""
        return self._seq_len

    @abstractmethod
    def append(self, k_new: torch.Tensor, v_new: torch.Tensor) -> None:
        """Store the keys (B, Hkv, T, D) and values (B, Hkv, T, Dv) of the next T tokens, for `attend` to see."""

    @abstractmethod
    def update(self, k_new: torch.Tensor, v_new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append, and return the keys and values that the T tokens' queries may see, in order of position."""

    @abstractmethod
    def stored_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the stored keys (B, Hkv, stored_len, width) and values, in order of position, as they are stored."""

    def decoded_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the stored keys (B, Hkv, stored_len, D) and values, in order of position, in `dtype`."""
        return self._store.decode(*self.stored_rows(), self._dtype)

    def visible_rows(self, num_queries: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys (B, Hkv, S, D) and values that the last `num_queries` tokens' queries may see.

        They are in order of position and in `dtype`: what `update` of these tokens returned, asked for later.

        Raises:
            InvalidValueError: `num_queries` is negative or larger than `seq_len`.
        """
        check_up_to_seq_len("num_queries", num_queries, self._seq_len)
        return self.decoded_rows()  # without a window: all

    def can_rollback(self, n: int) -> bool:
        """Whether the last `n` tokens can be dropped: without a window whenever there are that many."""
        return check_int("n", n, minimum=0) <= self._seq_len

    @abstractmethod
    def _restore(self, k: torch.Tensor, v: torch.Tensor, seq_len: int) -> None:
        """Replace the content by detached rows, of this cache's shape, that `stored_rows` gave after `seq_len` tokens.

        Raises `InvalidValueError`, with nothing changed, if there are too many or too few of them.
        """

    @abstractmethod
    def _shorten(self, length: int) -> None:
        """Keep the first `length` tokens; `can_rollback` has said that this is possible."""

    @abstractmethod
    def _visible_rows(self, num_queries: int, starts: torch.Tensor | None) -> VisibleRows:
        """Return what the queries of the last `num_queries` tokens attend over."""

    @overload
    def attend(
        self, q: torch.Tensor, *, return_lse: Literal[False] = ..., **options: Unpack[CacheOptions]
    ) -> torch.Tensor: ...
    @overload
    def attend(
        self, q: torch.Tensor, *, return_lse: Literal[True], **options: Unpack[CacheOptions]
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def attend(
        self, q: torch.Tensor, *, return_lse: bool, **options: Unpack[CacheOptions]
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
    def attend(
        self,
        q: torch.Tensor,
        *,
        starts: IntTensorLike | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sink_logits: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend the queries of the last T tokens over what is stored; call it after their `append`.

        Args:
            q: (B, H, T, D) with H a multiple of `num_heads` and T at most `seq_len`; any floating dtype.
            starts: (B,) integers, the position of each row's first real token (left padding); default 0.
            scale: what scores are multiplied with; default 1 / sqrt(D).
            softcap: scores become `softcap * tanh(scores / softcap)`.
            sink_logits: (H,), one more logit a head without a value.
            return_lse: also return the log-sum-exp (B, H, T).

        Returns:
            The output (B, H, T, Dv) in q's dtype, or a pair of it and the log-sum-exp. No gradient flows into the
            cache; it does flow into `q`.

        Raises:
            InvalidValueError: a shape, device or value does not fit, or rows that the first of the T queries would
                see are no longer stored.
        """
        check_tensor("q", q, (self.batch_size, None, None, self.head_dim), "(B, H, T, D)", self.device)
        num_queries = q.shape[2]
        if num_queries > self._seq_len:
            raise InvalidValueError(f"q has T = {num_queries} queries; expected at most seq_len = {self._seq_len}")
        check_bool("return_lse", return_lse)
        check_head_groups(q.shape[1], self.num_heads)
        scale, softcap = check_scores(q, scale, softcap, sink_logits)
        starts = None if starts is None else self._check_starts(starts)
        k, v, starts, window, sinks, block_table, lengths = self._visible_rows(num_queries, starts)
        if block_table is None and torch.is_grad_enabled() and q.requires_grad:
            # Backward needs the rows of this step, whatever is stored by then; out of blocks attention takes copies.
            k, v = copied(k), copied(v)
        arguments = attention_arguments(
            q,
            k,
            v,
            k.shape[2],
            block_table,
            lengths,
            starts,
            window,
            sinks,
            scale,
            softcap,
            sink_logits,
            return_lse,
        )
        output, lse = checked_attention(arguments)
        return output if lse is None or not return_lse else (output, lse)

    def append_and_attend(
        self, q: torch.Tensor, k_new: torch.Tensor, v_new: torch.Tensor, *, scale: float | None = None
    ) -> torch.Tensor:
        """Append T new tokens, then attend their queries: `append` and `attend` in one.

        Unlike with the two apart, gradients flow into the new keys and values too. They never flow into the past.

        Args:
            q: (B, H, T, D); k_new: (B, Hkv, T, D); v_new: (B, Hkv, T, Dv).
            scale: what scores are multiplied with; default 1 / sqrt(D).

        Returns:
            The output (B, H, T, Dv) in q's dtype.

        Raises:
            CacheFullError, InvalidValueError, InvalidTypeError: as `append` does; nothing has been stored.
        """
        num_tokens = self._check_new_rows(k_new, v_new)
        check_tensor("q", q, (self.batch_size, None, num_tokens, self.head_dim), "(B, H, T, D)", self.device)
        check_head_groups(q.shape[1], self.num_heads)
        scale = None if scale is None else check_float("scale", scale)
        if not (torch.is_grad_enabled() and (k_new.requires_grad or v_new.requires_grad)):
            self.append(k_new, v_new)
            return self.attend(q, scale=scale)
        k, v = (
            # A copy either way: backward needs the rows of this step, whatever is stored by then.
            self.with_gradient(rows, new) if new.requires_grad else rows.clone()
            for rows, new in zip(self.update(k_new, v_new), (k_new, v_new), strict=True)
        )
        return attend(q, k, v, window=self.window, sinks=self.sinks, scale=scale)

    def with_gradient(self, rows: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Return `rows` (B, Hkv, S, D) that `update` gave for `new` (B, Hkv, T, D), with a gradient into `new`.

        These are the same rows where `new` requires no gradient, else a copy.
        """
        if not (torch.is_grad_enabled() and new.requires_grad):
            return rows
        past = rows.shape[2] - new.shape[2]
        stored = rows[:, :, past:] + (new - new.detach()).to(rows.dtype)
        return torch.cat([rows[:, :, :past], stored], dim=2)

    def next_positions(self, T: int, starts: IntTensorLike | None = None) -> torch.Tensor:  # noqa: N803
        """Return the positions (B, T) of the next T tokens, int64, for rotary or learned embeddings.

        With left padding `starts` (B,) says where each row's first real token sits; positions count from there, and
        padding gets position 0. The result is a snapshot: later tokens do not change it.

        >>> from kvcache import KVCache
        >>> KVCache(2, 1, 8, max_seq_len=8).next_positions(3, starts=[0, 2])
        tensor([[0, 1, 2],
                [0, 0, 0]])
        """
        num_tokens = check_int("T", T, minimum=0)
        positions = torch.arange(self._seq_len, self._seq_len + num_tokens, device=self.device)
        positions = positions.expand(self.batch_size, -1)
        if starts is not None:
            positions = positions - self._check_starts(starts)[:, None]
        return positions.clamp(min=0)

    def rollback(self, n: int) -> None:
        """Drop the last `n` tokens.

        Raises:
            InvalidValueError: `n` is negative or larger than `seq_len`.
            RollbackError: the shorter sequence needs rows that are no longer stored. Nothing has changed then.
        """
        n = check_up_to_seq_len("n", n, self._seq_len)
        if not self.can_rollback(n):
            raise RollbackError(
                f"{self!r} cannot drop its last {n} tokens: the rows that a sequence of {self._seq_len - n} tokens "
                "needs are no longer all stored; create it with a larger slack, or reset it and prefill again"
            )
        self._shorten(self._seq_len - n)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens; raises as `rollback` does."""
        self.rollback(self._seq_len - check_up_to_seq_len("length", length, self._seq_len))

    def reset(self) -> None:
        """Forget everything; the buffers stay allocated."""
        self._shorten(0)

    def reorder(self, index: IntTensorLike) -> None:
        """Let row b of the batch continue what row `index[b]` holds (beam search); `index` is (B,) integers."""
        rows = self._check_batch_index(index)
        if rows.shape[0] != self.batch_size:
            raise InvalidValueError(
                f"index has {rows.shape[0]} entries; expected batch_size = {self.batch_size} (select changes the size)"
            )
        self._rebatch(rows)

    def select(self, index: IntTensorLike) -> None:
        """Keep the rows `index` (at least one integer) of the batch, in that order."""
        self._rebatch(self._check_batch_index(index))

    def repeat(self, n: int) -> None:
        """Repeat each row of the batch `n` times: rows a, b become a, a, b, b for n = 2."""
        n = check_int("n", n, minimum=1)
        self._rebatch(torch.arange(self.batch_size, device=self.device).repeat_interleave(n))

    def to(self, device: torch.device | str) -> Self:
        """Move the buffers to `device`, in place, and return the cache itself (as `torch.nn.Module.to` does)."""
        target = check_device("device", device)
        self._store.to(target)
        self.rollback(0)  # drops what lives outside the buffers
        return self

    def copy(self) -> Self:
        """Return an independent cache with the same content."""
        return self._copied_with()

    def fork(self) -> Self:
        """Return an independent cache with the same content: a copy, where rows are not in blocks to be shared."""
        return self.copy()

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """The stored rows, in order of position, as they are kept: contiguous copies `"k"` and `"v"`."""
        return make_state(*self.stored_rows())

    @property
    def meta_state(self) -> dict[str, Any]:
        """What `from_state` needs beside the tensors: plain strings and ints, None for a limit that is not set."""
        head_dims = self._store.layer.head_dims
        return make_meta_state(type(self).__name__, self.dtype, self.storage, head_dims, self.seq_len, self.sizes)

    @classmethod
    def from_state(cls, state: Mapping[str, torch.Tensor], meta_state: Mapping[str, Any]) -> Self:
        """Rebuild a cache, on the device of the tensors, from what `state` and `meta_state` gave.

        Raises:
            InvalidValueError, InvalidTypeError: the state belongs to another class or version, or its tensors do not
                fit it.

        >>> from kvcache import KVCache
        >>> cache = KVCache(1, 1, 2, max_seq_len=4)
        >>> cache.append(torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3, 2))
        >>> KVCache.from_state(cache.state, cache.meta_state).seq_len
        3
        """
        saved = read_state(state, meta_state, cls.__name__, cls.size_names)
        constructor: Any = cls
        cache: Self = constructor(**saved.arguments)
        cache._restore(saved.k, saved.v, saved.seq_len)
        return cache

    def __copy__(self) -> Self:
        return self.copy()  # sharing the buffers would let one copy overwrite the other's rows

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_state, (self.state, self.meta_state)

    def __repr__(self) -> str:
        sizes = "".join(f"{name}={size}, " for name, size in self.sizes.items())
        storage = "" if self.storage == dtype_name(self.dtype) else f"storage={self.storage}, "
        v_head_dim = "" if self.v_head_dim == self.head_dim else f"v_head_dim={self.v_head_dim}, "
        return (
            f"{type(self).__name__}(batch_size={self.batch_size}, num_heads={self.num_heads}, "
            f"head_dim={self.head_dim}, {v_head_dim}{sizes}dtype={dtype_name(self.dtype)}, {storage}"
            f"device={self.device}, seq_len={self._seq_len})"
        )

    def _check_new_rows(self, k_new: torch.Tensor, v_new: torch.Tensor) -> int:
        """Check what `append` is given and return the number of new tokens."""
        batch_heads = self.batch_size, self.num_heads
        check_tensor("k_new", k_new, (*batch_heads, None, self.head_dim), "(B, Hkv, T, D)", self.device)
        num_tokens = k_new.shape[2]
        check_tensor("v_new", v_new, (*batch_heads, num_tokens, self.v_head_dim), "(B, Hkv, T, Dv)", self.device)
        return num_tokens

    def _full_error(self, length: int, max_seq_len: int) -> CacheFullError:
        """Return the error for tokens up to `length` that do not fit."""
        return CacheFullError(
            f"{type(self).__name__} is full: {self._seq_len} of {max_seq_len} tokens stored, "
            f"{length - self._seq_len} more asked for; create it with max_seq_len >= {length}"
        )

    def _check_complete(self, k: torch.Tensor, seq_len: int, max_seq_len: int | None) -> None:
        """Check that rows (B, Hkv, S, width) that are to be restored are those of all of `seq_len` tokens, and fit."""
        if k.shape[2] != seq_len or (max_seq_len is not None and seq_len > max_seq_len):
            raise InvalidValueError(
                f"the state has {k.shape[2]} rows after {seq_len} tokens; expected a row for each token and "
                f"max_seq_len >= {seq_len}, which is {max_seq_len}"
            )

    def _check_starts(self, starts: IntTensorLike) -> torch.Tensor:
        checked = check_int_tensor("starts", starts, (self.batch_size,), "(B,)", self.device)
        check_range("starts", checked, 0)
        return checked

    def _check_batch_index(self, index: IntTensorLike) -> torch.Tensor:
        rows = check_int_tensor("index", index, (None,), "(rows,)", self.device)
        if rows.numel() == 0:
            raise InvalidValueError("index is empty; expected at least one row of the batch")
        check_range("index", rows, 0, self.batch_size - 1)
        return rows

    def _rebatch(self, index: torch.Tensor) -> None:
        """Let row i of the batch become what row `index[i]` holds, in the same buffers where the batch size stays."""
        k, v = (rows.index_select(0, index) for rows in self.stored_rows())
        if len(index) != self.batch_size:
            self._store = self._store.empty_like(len(index))
        self._restore(k, v, self._seq_len)

    def _copied_with(self, **sizes: int) -> Self:
        """Return an independent cache with the same content and other sizes."""
        k, v = self.stored_rows()
        return self.from_state({"k": k, "v": v}, self.meta_state | sizes)
