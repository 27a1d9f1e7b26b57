"""transformers' `Cache` over the caches of this package: one layer object for each decoder layer.

    full_attention       FullLayer      over KVCache              preallocated, or doubling as it fills
    sliding_attention    WindowLayer    over SlidingWindowCache   the same up to the window, then constant

A layer object only translates; which rows stay, and where, is decided in `kvcache.storage`.
"""

import copy
import warnings
from abc import abstractmethod
from collections import Counter
from typing import Any, Self

import torch
from transformers import Cache, EncoderDecoderCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, get_layer_types_and_kwargs

from kvcache.checks import check_dtype, check_int
from kvcache.errors import CacheFullError, InvalidTypeError, InvalidValueError, RollbackError
from kvcache.hf.guard import Guard, guard_model
from kvcache.storage import KVCache, LayerCache, SlidingWindowCache


class StoredLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """The cache of one decoder layer, built when the first keys and values come."""

    is_croppable = True
    is_sliding: bool
    rows: LayerCache | None

    def __init__(self, max_tokens: int | None, storage: torch.dtype | None) -> None:
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

    @abstractmethod
    def _stored(self, rows: LayerCache) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the stored keys and values in order of position, in the storage dtype."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate for the sizes and device of keys (B, Hkv, T, D) and values (B, Hkv, T, Dv), and the wider dtype.

        Whatever comes later is cast by value to that dtype.
        """
        self.rows = self._built_for(key_states, value_states)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys (B, Hkv, T, D) and values (B, Hkv, T, Dv); return those that the T tokens' queries may see.

        Raises:
            CacheFullError: more than `max_tokens` tokens. Layers of one model are equally long, so that the first
                one raises before any is written.
            InvalidValueError: other sizes or another device than at the first update. Nothing has been stored.
        """
        length = self.get_seq_length() + key_states.shape[-2]
        if self.max_tokens is not None and length > self.max_tokens:
            raise CacheFullError(
                f"the cache is full: {self.get_seq_length()} of {self.max_tokens} tokens stored, "
                f"{key_states.shape[-2]} more asked for; create it with cache_for(model, max_tokens={length}) or more"
            )
        if self.rows is not None and key_states.shape[0] != self.rows.batch_size:
            raise InvalidValueError(
                f"the cache holds {self.rows.batch_size} sequences, the input has {key_states.shape[0]}; reset() the "
                "cache, or repeat its rows with batch_repeat_interleave (beams and num_return_sequences need one each)"
            )
        rows = self._built_for(key_states, value_states) if self.rows is None else self.rows
        rows = self._with_room(rows, length)
        k, v = rows.update(key_states, value_states)
        self.rows = rows
        return _with_gradient(k, key_states, rows), _with_gradient(v, value_states, rows)

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

    def reset(self) -> None:
        """Forget everything, the sizes included: what comes next may have another batch size."""
        self.rows = None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let row b of the batch continue what row `beam_idx[b]` holds."""
        if self.rows is not None:
            self.rows.reorder(beam_idx.to(self.rows.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch: a, b become a, a, b, b."""
        if self.rows is not None:
            self.rows.repeat(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows of the batch."""
        if self.rows is not None:
            self.rows.select(indices.to(self.rows.device))

    def can_crop(self, tokens_to_remove: int) -> bool:
        """Whether the rows that the shorter sequence needs are still stored; see `crop`."""
        return self.rows is None or self.rows.can_rollback(min(-tokens_to_remove, self.rows.seq_len))

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` tokens, all of them if there are fewer."""
        if self.rows is not None:
            self.rows.rollback(min(-tokens_to_remove, self.rows.seq_len))

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
        return self._stored(self.rows)[part].to(self.rows.dtype)


class FullLayer(StoredLayer):  # type: ignore[no-untyped-call]
    """A layer that attends to every token."""

    is_sliding = False

    def _build(self, **options: Any) -> LayerCache:
        return KVCache(max_seq_len=self.max_tokens or 0, **options)

    def _with_room(self, rows: LayerCache, length: int) -> LayerCache:
        assert isinstance(rows, KVCache)
        if length <= rows.max_seq_len:
            return rows
        k, v = self._stored(rows)
        capacity = max(length, 2 * rows.max_seq_len)
        return KVCache.from_state({"k": k, "v": v}, rows.meta_state | {"max_seq_len": capacity})

    def _visible_past(self) -> int:
        return self.get_seq_length()

    def _stored(self, rows: LayerCache) -> tuple[torch.Tensor, torch.Tensor]:
        return rows.k_cache[:, :, : rows.seq_len], rows.v_cache[:, :, : rows.seq_len]


class WindowLayer(StoredLayer):  # type: ignore[no-untyped-call]
    """A layer that attends to the last `sliding_window` tokens.

    While it records (`record_past`), it keeps what is needed to drop every token since the last crop.
    """

    is_sliding = True

    def __init__(self, sliding_window: int, max_tokens: int | None, storage: torch.dtype | None) -> None:
        super().__init__(max_tokens, storage)
        self.sliding_window = sliding_window
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
            self.rows = _resized(self.rows, self.rows.window, slack=0)

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
        return rows if (window, slack) == (rows.window, rows.slack) else _resized(rows, window, slack)

    def _visible_past(self) -> int:
        return min(self.get_seq_length(), self.sliding_window - 1)

    def _stored(self, rows: LayerCache) -> tuple[torch.Tensor, torch.Tensor]:
        state = rows.state
        return state["k"], state["v"]


class ModelCache(Cache):
    """The caches of all layers of one model; made by `cache_for`."""

    layers: list[StoredLayer]  # type: ignore[assignment]

    def __init__(self, layers: list[StoredLayer], guard: Guard) -> None:
        super().__init__(layers=layers)  # type: ignore[arg-type]
        self.guard = guard
        self._tokens: torch.Tensor | None = None

    @property
    def batch_size(self) -> int:
        """Rows of the batch, -1 before the first update."""
        return next((layer.rows.batch_size for layer in self.layers if layer.rows is not None), -1)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, used rows and free ones."""
        return sum(layer.rows.nbytes for layer in self.layers if layer.rows is not None)

    def known_tokens(self) -> torch.Tensor | None:
        """Return the ids (B, seq_len) of the stored tokens, None where a forward has not told them all."""
        seq_len = self.get_seq_length()
        if self._tokens is None or self._tokens.shape[1] < seq_len:
            return None
        return self._tokens[:, :seq_len]

    def note_tokens(self, input_ids: torch.Tensor | None) -> None:
        """Note the ids (B, T) of the tokens that come next; None where they are unknown."""
        if input_ids is None or input_ids.ndim != 2:
            self._tokens = None
            return
        known = input_ids[:, :0] if self.get_seq_length() == 0 else self.known_tokens()
        fits = known is not None and known.shape[0] == input_ids.shape[0] and known.device == input_ids.device
        self._tokens = torch.cat([known, input_ids], dim=1) if known is not None and fits else None

    def reset(self) -> None:
        """Forget everything; the next text may have another batch size."""
        super().reset()  # type: ignore[no-untyped-call]
        self._tokens = None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let row b of the batch continue what row `beam_idx[b]` holds (beam search)."""
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self._tokens = None if self._tokens is None else self._tokens[beam_idx.to(self._tokens.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch: a, b become a, a, b, b."""
        super().batch_repeat_interleave(repeats)
        self._tokens = None if self._tokens is None else self._tokens.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows of the batch."""
        super().batch_select_indices(indices)
        self._tokens = None if self._tokens is None else self._tokens[indices.to(self._tokens.device)]

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` tokens: 0 keeps all, more than there are empties.

        Raises:
            InvalidValueError: `tokens_to_remove` is positive.
            RollbackError: a window no longer holds what the shorter text needs. No layer has changed.
        """
        if tokens_to_remove > 0:
            raise InvalidValueError(
                f"tokens_to_remove is {tokens_to_remove}; expected 0 or less, crop(-2) drops the last two tokens"
            )
        for index, layer in enumerate(self.layers):
            if not layer.can_crop(tokens_to_remove):
                raise RollbackError(
                    f"layer {index} has seen {layer.get_seq_length()} tokens and its window no longer holds what it "
                    f"needs without the last {-tokens_to_remove}; call activate_past_recording() before the tokens "
                    "that may have to go, or reset() the cache and start again"
                )
        super().crop(tokens_to_remove)

    def __copy__(self) -> Self:
        return copy.deepcopy(self)  # sharing the buffers would let one copy overwrite the other's rows

    def __repr__(self) -> str:
        kinds = Counter(
            f"sliding (window {layer.sliding_window})" if isinstance(layer, WindowLayer) else "full"
            for layer in self.layers
        )
        layers = " + ".join(f"{count} {kind}" for kind, count in kinds.items())
        return (
            f"{type(self).__name__}({layers} layers, max_tokens={self.layers[0].max_tokens}, "
            f"batch_size={self.batch_size}, seq_len={self.get_seq_length()}, nbytes={self.nbytes})"
        )


class EncoderDecoderModelCache(EncoderDecoderCache):
    """A cache for the decoder's own tokens and one for the encoder's, which is written once."""

    self_attention_cache: ModelCache  # type: ignore[assignment]
    cross_attention_cache: ModelCache  # type: ignore[assignment]

    @property
    def batch_size(self) -> int:
        """Rows of the batch, -1 before the first update."""
        return self.self_attention_cache.batch_size

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, used rows and free ones."""
        return self.self_attention_cache.nbytes + self.cross_attention_cache.nbytes

    def check_dynamic_cache(self, method: str) -> None:
        """Allow what transformers allows only on its own `DynamicCache`: crop, repeat and select."""

    def __copy__(self) -> Self:
        return copy.deepcopy(self)


def cache_for(
    model: PreTrainedModel, max_tokens: int | None = None, *, storage: torch.dtype | str | None = None
) -> ModelCache | EncoderDecoderModelCache:
    """Return an empty cache for `model.generate(**inputs, cache=cache)`, or for `model(ids, cache=cache)`.

    A cache continues one text (or batch of texts): give the whole text again, cached tokens included, or only the new
    tokens with an `attention_mask` that covers all; `reset()` it for another text. Mistakes in this that would give
    wrong text are caught as long as a cache of the model lives (see `kvcache.hf.guard`).

    Args:
        model: a transformers model that can generate, with full or sliding attention in every layer.
        max_tokens: tokens that fit, preallocated at the first use; None: as many as come, by doubling the buffers.
        storage: how rows are kept ("float32", "bfloat16", "float16", "float64"); default: as they come.

    Raises:
        InvalidTypeError: `model` is no transformers model that can generate.
        InvalidValueError: a layer is of a kind that is not supported, or an argument is out of range.

    Example::

        cache = kvcache.hf.cache_for(model)
        output = model.generate(**tokenizer("Once upon a time", return_tensors="pt"), cache=cache)
    """
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise InvalidTypeError(
            f"model is a {type(model).__name__}; expected a transformers model that can generate, for instance from "
            "AutoModelForCausalLM.from_pretrained"
        )
    max_tokens = None if max_tokens is None else check_int("max_tokens", max_tokens, minimum=1)
    dtype = None if storage is None else check_dtype("storage", storage)
    config = model.config.get_text_config(decoder=True)
    layers = _layers(config, max_tokens, dtype)
    _warn_about_changing_positions(config, max_tokens)
    guard = guard_model(model)
    cache = ModelCache(layers, guard)
    if not model.config.is_encoder_decoder:
        return cache
    return EncoderDecoderModelCache(cache, ModelCache([FullLayer(None, dtype) for _ in layers], guard))


def _layers(config: PreTrainedConfig, max_tokens: int | None, storage: torch.dtype | None) -> list[StoredLayer]:
    layers: list[StoredLayer] = []
    for index, (kind, options) in enumerate(zip(*get_layer_types_and_kwargs(config), strict=True)):
        if kind == "full_attention":
            layers.append(FullLayer(max_tokens, storage))
        elif kind == "sliding_attention":
            layers.append(WindowLayer(options["sliding_window"], max_tokens, storage))
        else:
            raise InvalidValueError(
                f"layer {index} of the model is of kind {kind!r}; expected full_attention or sliding_attention in "
                "every layer; leave the cache out to let transformers use its own"
            )
    return layers


def _warn_about_changing_positions(config: PreTrainedConfig, max_tokens: int | None) -> None:
    """Warn where the rotary base depends on the length, so that cached keys keep the base of an earlier one."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        kind = rope.get("rope_type") or ""
        if kind != "longrope" and "dynamic" not in kind:
            continue
        trained = rope["original_max_position_embeddings"] if kind == "longrope" else config.max_position_embeddings
        if max_tokens is None or max_tokens > trained:
            warnings.warn(
                f"rotary positions of type {kind!r} change beyond {trained} tokens, but keys cached "
                "earlier keep the old ones, so results there differ from a run without a cache; "
                f"cache_for(model, max_tokens={trained}) stops before",
                stacklevel=3,
            )
            return


def _resized(rows: SlidingWindowCache, window: int, slack: int) -> SlidingWindowCache:
    return SlidingWindowCache.from_state(rows.state, rows.meta_state | {"window": window, "slack": slack})


def _with_gradient(rows: torch.Tensor, new: torch.Tensor, cache: LayerCache) -> torch.Tensor:
    """Return `rows`, which end with `new` detached; where `new` needs a gradient, as a copy through which it flows."""
    if not (torch.is_grad_enabled() and new.requires_grad):
        return rows
    stored = new.to(cache.k_cache.dtype).to(rows.dtype)
    return torch.cat([rows[:, :, : rows.shape[2] - new.shape[2]], stored], dim=2)
