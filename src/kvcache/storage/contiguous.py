"""A preallocated cache that keeps every token: `(batch, heads, max_seq_len, head_dim)`, filled from the front."""

from typing import Self

import torch

from kvcache.checks import check_int
from kvcache.storage.codecs import StorageLike
from kvcache.storage.layer import LayerCache, VisibleRows


class KVCache(LayerCache):
    """Keys and values of one layer in two preallocated buffers.

    Args:
        batch_size: rows of the batch, B >= 1.
        num_heads: key/value heads, Hkv >= 1 (fewer than query heads in grouped-query attention).
        head_dim: head size of the keys, D >= 1.
        max_seq_len: tokens that fit, >= 0.
        dtype: what comes out, a floating torch dtype or its name.
        device: where the buffers are.
        v_head_dim: head size of the values, Dv; default D.
        storage: how rows are kept: "float32", "bfloat16", "float16", "float64" or a torch dtype, "int8", "int4", or
            two of these for keys and values, as in "int8/int4"; default `dtype`. Whatever is stored is cast by
            value, and detached: no gradient flows through the past.

    Attributes:
        k_cache, v_cache: the buffers (batch_size, num_heads, max_seq_len, head_dim), with a row's bytes (uint8) in the
            place of head_dim for int8 and int4; the first `seq_len` rows hold tokens, the others nothing that is ever
            read.

    Raises:
        InvalidValueError, InvalidTypeError: an argument is out of range or of the wrong kind.

    >>> cache = KVCache(batch_size=1, num_heads=2, head_dim=4, max_seq_len=16)
    >>> k, v = cache.update(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4))  # prefill: 3 tokens
    >>> k, v = cache.update(torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4))  # decode: 1 token
    >>> k.shape, cache.seq_len, cache.nbytes
    (torch.Size([1, 2, 4, 4]), 4, 1024)
    >>> cache.attend(torch.randn(1, 6, 1, 4)).shape  # 6 query heads, 3 for each key/value head
    torch.Size([1, 6, 1, 4])
    """

    size_names = ("max_seq_len",)

    def __init__(
        self,
        batch_size: int,
        num_heads: int,
        head_dim: int,
        max_seq_len: int,
        dtype: torch.dtype | str = torch.float32,
        device: torch.device | str = "cpu",
        *,
        v_head_dim: int | None = None,
        storage: StorageLike | None = None,
    ) -> None:
        max_seq_len = check_int("max_seq_len", max_seq_len, minimum=0)
        super().__init__(batch_size, num_heads, head_dim, max_seq_len, dtype, device, v_head_dim, storage)

    @property
    def max_seq_len(self) -> int:
        """Tokens that fit."""
        return self._store.block_size

    def append(self, k_new: torch.Tensor, v_new: torch.Tensor) -> None:
        """Store the keys and values of the next T tokens; `attend` then sees them.

        Args:
            k_new: (B, Hkv, T, D), any floating dtype (cast by value), on the cache's device. T may be 0.
            v_new: (B, Hkv, T, Dv), likewise.

        Raises:
            CacheFullError: fewer than T tokens fit. Nothing has been stored then.
            InvalidValueError, InvalidTypeError: a shape, dtype or device does not fit; nothing has been stored.
        """
        length = self._seq_len + self._check_new_rows(k_new, v_new)
        if length > self.max_seq_len:
            raise self._full_error(length, self.max_seq_len)
        self._store.write(k_new, v_new, self._seq_len)
        self._seq_len = length

    def update(self, k_new: torch.Tensor, v_new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the keys and values of the next T tokens and return all of them; takes and raises what `append` does.

        Returns:
            All keys (B, Hkv, seq_len, D) and values (B, Hkv, seq_len, Dv): views of the buffers, without a copy
            (decoded copies where `storage` is not `dtype`). Views show what the buffers hold: a later rollback and
            append, or a reorder, changes them.
        """
        self.append(k_new, v_new)
        return self.decoded_rows()

    def stored_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all keys (B, Hkv, seq_len, width) and values, as they are stored: views of the buffers."""
        store, length = self._store, self._seq_len
        return store.k.narrow(2, 0, length), store.v.narrow(2, 0, length)

    def resized(self, max_seq_len: int) -> Self:
        """Return an independent cache with the same content and room for `max_seq_len` tokens, at least `seq_len`."""
        return self._copied_with(max_seq_len=max_seq_len)

    def _restore(self, k: torch.Tensor, v: torch.Tensor, seq_len: int) -> None:
        self._check_complete(k, seq_len, self.max_seq_len)
        self._store.put(k, v, 0)
        self._seq_len = seq_len

    def _shorten(self, length: int) -> None:
        self._seq_len = length

    def _visible_rows(self, num_queries: int, starts: torch.Tensor | None) -> VisibleRows:
        return VisibleRows(*self._store.readable(*self.stored_rows()), starts)
