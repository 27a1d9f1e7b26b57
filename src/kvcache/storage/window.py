"""A cache that keeps only what a sliding window still needs: the first `sinks` tokens and the newest ones.

    slot      0 .. sinks-1      sinks .. sinks + window + slack - 1
    holds     positions         a ring: position p >= sinks is in slot sinks + (p - sinks) % (window + slack)
              0 .. sinks-1

The ring holds `slack` tokens more than the window, so that this many can be rolled back.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple, Self

import torch

from kvcache.checks import check_int, check_up_to_seq_len
from kvcache.errors import InvalidValueError
from kvcache.storage.codecs import StorageLike
from kvcache.storage.layer import LayerCache, VisibleRows


class _Step(NamedTuple):
    """The ordered rows of a step longer than the store, until they are no longer needed."""

    k: torch.Tensor
    v: torch.Tensor
    first: int  # the lowest position after the sinks


class SlidingWindowCache(LayerCache):
    """Keys and values of one sliding-window layer: constant memory, however long the sequence.

    A query sees the last `window` tokens, its own included, and the first `sinks` tokens of the sequence.

    Args:
        batch_size: rows of the batch, B >= 1.
        num_heads: key/value heads, Hkv >= 1.
        head_dim: head size of the keys, D >= 1.
        window: tokens that a query sees, >= 1.
        dtype: what comes out, a floating torch dtype or its name.
        device: where the buffers are.
        sinks: first tokens that stay visible for ever (StreamingLLM, arXiv:2309.17453, section 3).
        slack: tokens kept beyond the window; once full, up to `slack + 1` tokens can be rolled back.
        v_head_dim: head size of the values, Dv; default D.
        storage: how rows are kept, as in `KVCache`; default `dtype`.

    Attributes:
        k_cache, v_cache: the buffers (batch_size, num_heads, sinks + window + slack, head_dim), as in `KVCache`.

    Raises:
        InvalidValueError, InvalidTypeError: an argument is out of range or of the wrong kind.

    >>> cache = SlidingWindowCache(1, 1, 4, window=3, sinks=2)
    >>> k, v = cache.update(torch.randn(1, 1, 8, 4), torch.randn(1, 1, 8, 4))
    >>> cache.seq_len, cache.stored_len, cache.positions.tolist()
    (8, 5, [0, 1, 5, 6, 7])
    """

    size_names = ("window", "sinks", "slack")
    window: int

    def __init__(
        self,
        batch_size: int,
        num_heads: int,
        head_dim: int,
        window: int,
        dtype: torch.dtype | str = torch.float32,
        device: torch.device | str = "cpu",
        *,
        sinks: int = 0,
        slack: int = 0,
        v_head_dim: int | None = None,
        storage: StorageLike | None = None,
    ) -> None:
        self.window = check_int("window", window, minimum=1)
        self.sinks = check_int("sinks", sinks, minimum=0)
        self.slack = check_int("slack", slack, minimum=0)
        num_rows = self.sinks + self.window + self.slack
        super().__init__(batch_size, num_heads, head_dim, num_rows, dtype, device, v_head_dim, storage)
        self._first = self.sinks  # the lowest position in the ring
        self._step: _Step | None = None

    @property
    def stored_len(self) -> int:
        """Tokens whose rows are stored, at most sinks + window + slack."""
        return min(self.sinks, self._seq_len) + max(0, self._seq_len - self._first)

    @property
    def positions(self) -> torch.Tensor:
        """Positions of the stored rows, ascending, int64 (stored_len,)."""
        sinks = torch.arange(min(self.sinks, self._seq_len), device=self.device)
        return torch.cat([sinks, torch.arange(self._first, max(self._first, self._seq_len), device=self.device)])

    def append(self, k_new: torch.Tensor, v_new: torch.Tensor) -> None:
        """Store the keys and values of the next T tokens; `attend` then sees them.

        Args:
            k_new: (B, Hkv, T, D), any floating dtype (cast by value), on the cache's device. T may be 0.
            v_new: (B, Hkv, T, Dv), likewise.

        Raises:
            InvalidValueError, InvalidTypeError: a shape, dtype or device does not fit; nothing has been stored.
        """
        num_tokens = self._check_new_rows(k_new, v_new)
        if num_tokens == 0:
            return
        length = self._seq_len + num_tokens
        first_visible = self._first_visible(self._seq_len)
        first = max(self._first, length - (self.window + self.slack))
        step = None
        if first_visible < first:  # the step's own queries see rows that the step itself pushes out of the store
            kept_k, kept_v = self._store.encode(k_new, v_new)
            k, v = self._ordered(first_visible)
            step = _Step(torch.cat([k, kept_k], dim=2), torch.cat([v, kept_v], dim=2), first_visible)
            self._write(kept_k, kept_v, self._seq_len, self._store.put)
        else:
            self._write(k_new, v_new, self._seq_len, self._store.write)
        self._seq_len, self._first, self._step = length, first, step

    def update(self, k_new: torch.Tensor, v_new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the keys and values of the next T tokens; takes and raises what `append` does.

        Returns:
            Copies of the keys and values that the T queries may see, in order of position: the sinks, up to
            `window - 1` tokens before the new ones, and the new ones. With S of them, query t of the step sees the
            slots that `attend(..., window=window, sinks=sinks)` lets it see.
        """
        self.append(k_new, v_new)
        return self.visible_rows(k_new.shape[2])

    def stored_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the stored keys (B, Hkv, stored_len, width) and values, in order of position."""
        return self._ordered(self._first)

    def visible_rows(self, num_queries: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As `LayerCache.visible_rows`, copies; `InvalidValueError` too if some of the rows are no longer stored."""
        num_queries = check_up_to_seq_len("num_queries", num_queries, self._seq_len)
        k, v = self._ordered(self._first_stored_for(num_queries))
        if self._step is not None:  # `attend` reads those too, so the caller gets copies
            k, v = k.clone(), v.clone()
        return self._store.decode(k, v, self._dtype)

    def resized(self, *, window: int | None = None, slack: int | None = None) -> Self:
        """Return an independent cache with the same content and another window or slack.

        Raises:
            InvalidValueError: a larger window would see tokens that are no longer stored.
        """
        window, slack = self.window if window is None else window, self.slack if slack is None else slack
        return self._copied_with(window=window, slack=slack)

    def can_rollback(self, n: int) -> bool:
        """Whether the last `n` tokens can be dropped; once full this holds at least for n <= slack + 1."""
        length = self._seq_len - check_int("n", n, minimum=0)
        first_needed = self._first_visible(length)
        return length >= 0 and (first_needed >= self._first or first_needed >= length)

    def _first_visible(self, position: int) -> int:
        """Return the lowest position after the sinks that a query at `position` sees."""
        return max(self.sinks, position - self.window + 1)

    def _restore(self, k: torch.Tensor, v: torch.Tensor, seq_len: int) -> None:
        sinks = min(self.sinks, seq_len)
        first = seq_len - (k.shape[2] - sinks)
        if k.shape[2] < sinks or not sinks <= first <= self._first_visible(seq_len):
            raise InvalidValueError(
                f"state holds {k.shape[2]} rows; that does not fit seq_len = {seq_len}, window = {self.window}, "
                f"sinks = {self.sinks}"
            )
        self._write(k[:, :, :sinks], v[:, :, :sinks], 0, self._store.put)
        self._write(k[:, :, sinks:], v[:, :, sinks:], first, self._store.put)
        self._seq_len = seq_len
        self._first = max(first, self.sinks, seq_len - (self.window + self.slack))
        self._step = None

    def _shorten(self, length: int) -> None:
        self._seq_len = length
        self._first = min(self._first, max(length, self.sinks))
        self._step = None

    def _visible_rows(self, num_queries: int, starts: torch.Tensor | None) -> VisibleRows:
        if num_queries == 0:  # they see nothing, so nothing needs to be stored
            return VisibleRows(*self._store.readable(self.k_cache[:, :, :0], self.v_cache[:, :, :0]))
        first_visible = self._first_visible(self._seq_len - num_queries)
        if num_queries == 1 and starts is None and self._all_stored_rows_visible(first_visible):
            # One query sees them all, so their order in the ring does not matter and nothing is copied.
            stored = slice(self.stored_len)
            return VisibleRows(*self._store.readable(self.k_cache[:, :, stored], self.v_cache[:, :, stored]))
        first_visible = self._first_stored_for(num_queries)
        k, v = self._store.readable(*self._ordered(first_visible))
        return VisibleRows(k, v, self._starts_in_slots(starts, first_visible), self.window, self.sinks)

    def _first_stored_for(self, num_queries: int) -> int:
        """Return the lowest position after the sinks that is needed for the last `num_queries` tokens' queries."""
        first_visible = self._first_visible(self._seq_len - num_queries)
        if first_visible >= self._first:
            return first_visible
        if self._step is None or first_visible < self._step.first:
            raise InvalidValueError(
                f"the first of the last {num_queries} tokens' queries sees tokens from position {first_visible} on; "
                f"stored are those from {self._first} on; attend right after the step's append, or create the cache "
                f"with slack >= {self.slack + self._first - first_visible}"
            )
        return self._step.first

    def _all_stored_rows_visible(self, first_visible: int) -> bool:
        in_front_slots = self._first == self.sinks or self.stored_len == self.k_cache.shape[2]
        return first_visible == self._first and in_front_slots

    def _starts_in_slots(self, starts: torch.Tensor | None, first_visible: int) -> torch.Tensor | None:
        """Turn positions into slots of the ordered rows: the sinks, then those from `first_visible` on."""
        if starts is None or first_visible == self.sinks:  # no position is missing, so slots are positions
            return starts
        if self.sinks == 0:
            return (starts - first_visible).clamp(min=0)
        if starts.any():
            raise InvalidValueError(
                f"starts holds {int(starts.max())}, but the first {self.sinks} tokens, kept as sinks, are padding "
                "there and the row's own first tokens have been dropped; use sinks=0 for left-padded batches"
            )
        return None

    def _ordered(self, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the sinks and of the rows from position `first` on, in order."""
        if first < self._first:
            assert self._step is not None
            assert self._step.first == first
            return self._step.k, self._step.v
        k, v = (
            torch.cat([cache[:, :, :0], *self._pieces(cache, first)], dim=2) for cache in (self.k_cache, self.v_cache)
        )
        return k, v

    def _pieces(self, cache: torch.Tensor, first: int) -> Iterator[torch.Tensor]:
        """Yield views of the sinks and of the rows from position `first` on, in order."""
        for start, stop in ((0, min(self.sinks, self._seq_len)), (first, self._seq_len)):
            for slots in self._slots(start, stop):
                yield cache[:, :, slots]

    def _slots(self, start: int, stop: int) -> Iterator[slice]:
        """Yield the runs of slots that hold the positions [start, stop), on one side of the end of the sinks."""
        ring = self.window + self.slack
        while start < stop:
            if start < self.sinks:
                slot, run = start, stop - start
            else:
                slot = self.sinks + (start - self.sinks) % ring
                run = min(stop - start, self.sinks + ring - slot)
            yield slice(slot, slot + run)
            start += run

    def _write(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        start: int,
        store_at: Callable[[torch.Tensor, torch.Tensor, int], None],  # the store's `write` or `put`
    ) -> None:
        """Store the rows of the positions from `start` on, but those that later ones among them push out."""
        stop = start + k.shape[2]
        ring_start = max(start, self.sinks, stop - (self.window + self.slack))
        for position, end in ((start, min(self.sinks, stop)), (ring_start, stop)):
            for slots in self._slots(position, end):
                run = slots.stop - slots.start
                rows = slice(position - start, position - start + run)
                store_at(k[:, :, rows], v[:, :, rows], slots.start)
                position += run
