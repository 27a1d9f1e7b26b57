"""The cache of one decoder layer, as transformers asks for it.

    full_attention       FullLayer      over KVCache              preallocated, or growing as it fills
                                        or PagedCache             with a block size: blocks are added as it fills
    sliding_attention    WindowLayer    over SlidingWindowCache   the same up to the window, then constant

A layer object only translates; which rows stay, and where, is decided in `kvcache.storage`.
"""

import copy
import warnings
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple, Self, Unpack

import torch
from torch.compiler import is_compiling
from transformers.cache_utils import CacheLayerMixin

from kvcache.attention.arguments import ScoreOptions
from kvcache.errors import CacheFullError, InvalidValueError
from kvcache.hf.deferred import Deferred
from kvcache.storage import KVCache, LayerCache, PagedCache, SlidingWindowCache
from kvcache.storage.codecs import Storage

if TYPE_CHECKING:
    from kvcache.hf.masks import MaskRule


SPARE_TOKENS = 64  # at least; without a limit a buffer that grows is made an eighth longer than it needs to be


class StoredRows(NamedTuple):
    """The keys (part 0) or values (part 1) that the newest tokens' queries may see, in the store of a layer."""

    layer: "StoredLayer"
    part: int
    num_queries: int
    num_changes: int  # of the layer when it was asked

    @property
    def is_current(self) -> bool:
        """Whether the layer still holds what it held then."""
        return self.layer.num_changes == self.num_changes

    def attend(self, query: torch.Tensor, rule: "MaskRule", **options: Unpack[ScoreOptions]) -> torch.Tensor:
        """Attend queries (B, H, T, D) of the newest tokens under the layer's own rule and the mask's padding."""
        assert self.layer.rows is not None
        starts = rule.starts if rule.hides_keys else None  # positions: what a layer's cache counts in
        return self.layer.rows.attend(query, starts=starts, **options)

    def decoded(self) -> torch.Tensor:
        """Return the rows (B, Hkv, S, head size).

        Raises:
            InvalidValueError: the cache has changed since it returned what stands for them.
        """
        if not self.is_current:
            raise InvalidValueError("the cache has changed since it returned these keys and values; read them before")
        assert self.layer.rows is not None
        return self.layer.rows.visible_rows(self.num_queries)[self.part]


class StoredLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """The cache of one decoder layer, built when the first keys and values come."""

    is_croppable = True
    is_sliding: bool
    kind: str  # as people read it
    window: int | None = None
    rows: LayerCache | None
    is_touched = False  # whether the model does something with keys and values before they come to attention
    num_changes = 0  # of `rows`, counted for who reads them later

    def __init__(self, max_tokens: int | None, storage: Storage | None) -> None:
        # The base's __init__ would assign keys, values and is_initialized, which are read from `rows` here.
        self.rows = None
        self.max_tokens = max_tokens
        self.storage = storage

    @abstractmethod
    def _build(self, **options: Any) -> LayerCache:
        """Return an empty cache."""

    @abstractmethod
    def _with_room(self, rows: LayerCache, length: int) -> LayerCache:
        """Return `rows`, or a copy of it that has room for tokens up to `length`."""

    @abstractmethod
    def _visible_past(self) -> int:
        """Return how many stored tokens the next token sees."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate for the sizes and device of keys (B, Hkv, T, D) and values (B, Hkv, T, Dv), and the wider dtype.

        Whatever comes later is cast by value to that dtype.
        """
        self.rows = self._built_for(key_states, value_states)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, reads_store: bool = False, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys (B, Hkv, T, D) and values (B, Hkv, T, Dv); return those that the T tokens' queries may see.

        With `reads_store`, attention reads the store: what is returned are deferred tensors, decoded if touched.

        Raises:
            CacheFullError: more than `max_tokens` tokens. Layers of one model are equally long, so that the first
                one raises before any is written.
            InvalidValueError: other sizes or another device than at the first update. Nothing has been stored.
        """
        num_new = key_states.shape[-2]
        length = self.get_seq_length() + num_new
        if self.max_tokens is not None and length > self.max_tokens:
            raise CacheFullError(
                f"the cache is full: {self.get_seq_length()} of {self.max_tokens} tokens stored, "
                f"{num_new} more asked for; create it with cache_for(model, max_tokens={length}) or more "
                "(prompt + new tokens - 1)"
            )
        if self.rows is not None and key_states.shape[0] != self.rows.batch_size:
            raise InvalidValueError(
                f"the cache holds {self.rows.batch_size} sequences, the input has {key_states.shape[0]}; reset() the "
                "cache, or repeat its rows with batch_repeat_interleave (beams and num_return_sequences need one each)"
            )
        rows = self._built_for(key_states, value_states) if self.rows is None else self.rows
        rows = self._with_room(rows, length)
        self.num_changes += 1
        has_gradient = torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad)
        if reads_store and num_new > 0 and not (self.is_touched or has_gradient or is_compiling()):
            num_visible, _ = self.get_mask_sizes(num_new)
            rows.append(key_states, value_states)
            self.rows = rows
            return self._deferred(0, num_new, num_visible), self._deferred(1, num_new, num_visible)
        if isinstance(rows, PagedCache) and not is_compiling():
            warnings.warn(
                "attention that does not read the store needs a copy of all blocks at each step; call "
                "kvcache.hf.use_attention(model), or make the cache without block_size",
                stacklevel=2,
            )
        k, v = rows.update(key_states, value_states)
        rows.rollback(0)  # a window lets go of what only its own `attend` would read
        self.rows = rows
        return rows.with_gradient(k, key_states), rows.with_gradient(v, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many rows the next `update`, of `query_length` tokens, returns, and the position of the first."""
        past = self._visible_past()
        return past + query_length, self.get_seq_length() - past

    def get_seq_length(self) -> int:
        """Return the number of tokens seen."""
        return 0 if self.rows is None else self.rows.seq_len

    def get_max_length(self) -> int:
        """Return the number of tokens that fit, -1 for any."""
        return -1 if self.max_tokens is None else self.max_tokens

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        """Whether the buffers are allocated."""
        return self.rows is not None

    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]
        """The stored keys (B, Hkv, stored, D) in order of position, None if there are none."""
        return self._read(0)

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override]
        """The stored values (B, Hkv, stored, Dv), as `keys`."""
        return self._read(1)

    def offload(self) -> None:
        """Refuse: buffers stay on the model's device."""
        raise InvalidValueError("layers of cache_for(model) cannot be offloaded; use transformers' own cache for that")

    prefetch = offload

    def reset(self) -> None:
        """Forget everything, the sizes included: what comes next may have another batch size."""
        self.num_changes += 1
        self.rows = None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let row b of the batch continue what row `beam_idx[b]` holds."""
        self.num_changes += 1
        if self.rows is not None:
            self.rows.reorder(beam_idx.to(self.rows.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch: a, b become a, a, b, b."""
        self.num_changes += 1
        if self.rows is not None:
            self.rows.repeat(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows of the batch."""
        self.num_changes += 1
        if self.rows is not None:
            self.rows.select(indices.to(self.rows.device))

    def fork(self) -> Self:
        """Return an independent layer with the same content, which shares blocks where rows are in blocks."""
        other = copy.copy(self)
        other.rows = None if self.rows is None else self.rows.fork()
        return other

    def can_crop(self, tokens_to_remove: int) -> bool:
        """Whether the rows that the shorter sequence needs are still stored; see `crop`."""
        return self.rows is None or self.rows.can_rollback(min(-tokens_to_remove, self.rows.seq_len))

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` tokens, all of them if there are fewer."""
        self.num_changes += 1
        if self.rows is not None:
            self.rows.rollback(min(-tokens_to_remove, self.rows.seq_len))

    def _deferred(self, part: int, num_queries: int, num_visible: int) -> torch.Tensor:
        rows = self.rows
        assert rows is not None
        shape = rows.batch_size, rows.num_heads, num_visible, (rows.head_dim, rows.v_head_dim)[part]
        source = StoredRows(self, part, num_queries, self.num_changes)
        return Deferred.of(shape, rows.dtype, rows.device, source, source.decoded, self._note_touch)

    def warn_decoded(self, asked_for: str) -> None:
        """Say why the store is not read."""
        warnings.warn(
            f"attention under {asked_for} is PyTorch's ({self.kind}): a layer's keys and values are decoded for it at "
            "each step instead of being read where they are stored",
            stacklevel=2,
        )

    def _note_touch(self) -> None:
        if not self.is_touched:
            self.is_touched = True
            warnings.warn(
                f"the model does something with a layer's keys and values ({self.kind}) before it attends: they are "
                "decoded for it at each step instead of being read where they are stored",
                stacklevel=2,
            )

    def _built_for(self, key_states: torch.Tensor, value_states: torch.Tensor) -> LayerCache:
        batch_size, num_heads, _, head_dim = key_states.shape
        return self._build(
            batch_size=batch_size,
            num_heads=num_heads,
            head_dim=head_dim,
            v_head_dim=value_states.shape[-1],
            dtype=torch.promote_types(key_states.dtype, value_states.dtype),
            device=key_states.device,
            storage=self.storage,
        )

    def _read(self, part: int) -> torch.Tensor | None:
        if self.rows is None or self.rows.seq_len == 0:
            return None
        return self.rows.decoded_rows()[part]


class FullLayer(StoredLayer):  # type: ignore[no-untyped-call]
    """A layer that attends to every token; with a `block_size` over `PagedCache`."""

    is_sliding = False
    kind = "full"

    def __init__(self, max_tokens: int | None, storage: Storage | None, block_size: int | None = None) -> None:
        super().__init__(max_tokens, storage)
        self.block_size = block_size

    def _build(self, **options: Any) -> LayerCache:
        if self.block_size is not None:
            return PagedCache(block_size=self.block_size, max_seq_len=self.max_tokens, **options)
        return KVCache(max_seq_len=self.max_tokens or 0, **options)

    def _with_room(self, rows: LayerCache, length: int) -> LayerCache:
        if not isinstance(rows, KVCache) or length <= rows.max_seq_len:
            return rows
        is_first = rows.max_seq_len == 0  # an encoder's rows come once and never grow
        return rows.resized(length if is_first else length + max(SPARE_TOKENS, length // 8))

    def _visible_past(self) -> int:
        return self.get_seq_length()


class WindowLayer(StoredLayer):  # type: ignore[no-untyped-call]
    """A layer that attends to the last `sliding_window` tokens.

    While it records (`record_past`), it keeps what is needed to drop every token since the last crop.
    """

    is_sliding = True

    def __init__(self, sliding_window: int, max_tokens: int | None, storage: Storage | None) -> None:
        super().__init__(max_tokens, storage)
        self.sliding_window = self.window = sliding_window
        self.kind = f"sliding (window {sliding_window})"
        self.record_past = False
        self._recorded_from = 0

    def activate_past_recording(self) -> None:
        """Keep, from now on, what is needed to drop every token that comes before the next crop."""
        if not self.record_past:
            self.record_past = True
            self._recorded_from = self.get_seq_length()

    def get_max_length(self) -> int:
        """Return the number of tokens that a query sees at most, as transformers' sliding layers do."""
        return self.sliding_window if self.max_tokens is None else min(self.sliding_window, self.max_tokens)

    def reset(self) -> None:
        """Forget everything, the sizes and the recording included."""
        super().reset()
        self.record_past = False

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` tokens, then what was kept only to make this possible."""
        super().crop(tokens_to_remove)
        self._recorded_from = self.get_seq_length()
        if isinstance(self.rows, SlidingWindowCache) and self.rows.slack > self.sliding_window:
            self.rows = self.rows.resized(slack=0)

    def _build(self, **options: Any) -> LayerCache:
        return SlidingWindowCache(window=min(self.sliding_window, self.max_tokens or 1), **options)

    def _with_room(self, rows: LayerCache, length: int) -> LayerCache:
        assert isinstance(rows, SlidingWindowCache)
        window, slack = rows.window, rows.slack
        if length > window:
            window = min(self.sliding_window, max(length, 2 * window))
        first_needed = max(0, self._recorded_from - self.sliding_window + 1)
        slack_needed = length - self.sliding_window - first_needed
        if self.record_past and slack_needed > slack:
            slack = max(slack_needed, 2 * slack)
        same = (window, slack) == (rows.window, rows.slack)
        return rows if same else rows.resized(window=window, slack=slack)

    def _visible_past(self) -> int:
        return min(self.get_seq_length(), self.sliding_window - 1)
