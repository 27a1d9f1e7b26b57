"""transformers' `Cache` over the caches of this package: one layer object for each decoder layer."""

import copy
import warnings
from collections import Counter
from typing import Any, NamedTuple, Self

import torch
from transformers import Cache, EncoderDecoderCache, PreTrainedConfig, PreTrainedModel

from kvcache.checks import check_int
from kvcache.errors import InvalidValueError, RollbackError
from kvcache.hf.attention import NAME
from kvcache.hf.guard import Guard, check_model, guard_model
from kvcache.hf.layers import FullLayer, StoredLayer, WindowLayer
from kvcache.hf.tokens import TokenRecord
from kvcache.storage.codecs import Storage, StorageLike, check_storage
from kvcache.storage.model_config import decoder_config, layer_windows


class ModelCache(Cache):
    """The caches of all layers of one model; made by `cache_for`."""

    layers: list[StoredLayer]  # type: ignore[assignment]

    def __init__(self, layers: list[StoredLayer], guard: Guard, *, of_encoder: bool = False) -> None:
        super().__init__(layers=layers)  # type: ignore[arg-type]
        self.guard = guard
        self.of_encoder = of_encoder  # cross-attention reads its rows from the layers, at later steps without an update
        self._tokens = TokenRecord()
        self._began_at: int | None = None  # the length when the forward that is under way, or was interrupted, began

    @property
    def batch_size(self) -> int:
        """Rows of the batch, -1 before the first update."""
        return next((layer.rows.batch_size for layer in self.layers if layer.rows is not None), -1)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, used rows and free ones."""
        return sum(layer.rows.nbytes for layer in self.layers if layer.rows is not None)

    @property
    def stored_nbytes(self) -> int:
        """Bytes of the rows that hold tokens; what rows of the batch share in blocks counts once."""
        return sum(layer.rows.stored_nbytes for layer in self.layers if layer.rows is not None)

    @property
    def token_nbytes(self) -> int:
        """Bytes that one token's rows take in all layers, over the whole batch; 0 before the first update."""
        return sum(layer.rows.token_nbytes for layer in self.layers if layer.rows is not None)

    def attach(self, model: PreTrainedModel) -> Self:
        """Say to which model a loaded cache belongs, and return it; weights are not compared.

        Raises:
            InvalidTypeError, InvalidValueError: the model is none, or its layers are of other kinds.
        """
        kinds = [layer.kind for layer in self.layers]
        expected = [layer.kind for layer in _layers(_decoder_config(model), None, None, None)]
        if kinds != expected:
            raise InvalidValueError(f"the cache has layers of the kinds {kinds}; the model's are {expected}")
        self.guard = guard_model(model)
        return self

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append one layer's keys and values, as transformers' models do; see `StoredLayer.update`.

        Raises:
            InvalidValueError: the cache was loaded and is not attached to a model yet; and what the layer raises.
        """
        self.guard.check_attached()
        reads_store = self.guard.attention == NAME and not self.of_encoder
        return self.layers[layer_idx].update(key_states, value_states, *args, reads_store=reads_store, **kwargs)

    def drop_unfinished(self) -> None:
        """Take back what a forward that was interrupted left in some of the layers.

        Raises:
            InvalidValueError: a window no longer holds what it needs for that; nothing has changed.
        """
        lengths = [layer.get_seq_length() for layer in self.layers]
        finished = min(lengths) if self._began_at is None else min(*lengths, self._began_at)
        if finished == max(lengths):
            return
        unfinished = [layer for layer in self.layers if layer.get_seq_length() > finished]
        if not all(layer.can_crop(finished - layer.get_seq_length()) for layer in unfinished):
            raise InvalidValueError(
                f"a forward was interrupted: layers hold between {finished} and {max(lengths)} tokens, and a window no "
                "longer holds what it needs to go back; reset() the cache and give the whole text again"
            )
        for layer in unfinished:
            layer.crop(finished - layer.get_seq_length())
        self._began_at = None

    def begin(self) -> None:
        """Note that a forward begins; if it never ends, what it stores is taken back before the next."""
        self._began_at = self.get_seq_length()

    def finish(self) -> None:
        """Note that it ended."""
        self._began_at = None

    def known_tokens(self) -> torch.Tensor | None:
        """Return the ids (B, seq_len) of the stored tokens, None where a forward has not told them all."""
        return self._tokens.first(self.get_seq_length())

    def note_tokens(self, input_ids: torch.Tensor | None) -> None:
        """Note the ids (B, T) of the tokens that come next; None where they are unknown."""
        self._tokens.append(input_ids, after=self.get_seq_length())

    def fork(self) -> Self:
        """Return an independent cache with the same content, for another continuation of the text.

        With a `block_size`, full layers share their blocks with it until one of the two writes them; the rows of
        other layers are copied.
        """
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.layers = [layer.fork() for layer in self.layers]
        other._tokens = self._tokens.fork()
        return other

    def reset(self) -> None:
        """Forget everything; the next text may have another batch size."""
        self._began_at = None
        super().reset()  # type: ignore[no-untyped-call]
        self._tokens = TokenRecord()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let row b of the batch continue what row `beam_idx[b]` holds (beam search)."""
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self._tokens.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch: a, b become a, a, b, b."""
        rows = torch.arange(max(self.batch_size, 0)).repeat_interleave(repeats)
        super().batch_repeat_interleave(repeats)
        self._tokens.select(rows)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows of the batch."""
        super().batch_select_indices(indices)
        self._tokens.select(indices)

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
        kinds = Counter(layer.kind for layer in self.layers)
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

    def attach(self, model: PreTrainedModel) -> Self:
        """Say to which model a loaded cache belongs, and return it; see `ModelCache.attach`."""
        self.cross_attention_cache.guard = self.self_attention_cache.attach(model).guard
        return self

    def check_dynamic_cache(self, method: str) -> None:
        """Allow what transformers allows only on its own `DynamicCache`: crop, repeat and select."""

    def __copy__(self) -> Self:
        return copy.deepcopy(self)


def cache_for(
    model: PreTrainedModel,
    max_tokens: int | None = None,
    *,
    storage: StorageLike | None = None,
    block_size: int | None = None,
) -> ModelCache | EncoderDecoderModelCache:
    """Return an empty cache for `model.generate(**inputs, cache=cache)`, or for `model(ids, cache=cache)`.

    A cache continues one text (or batch of texts): give the whole text again, cached tokens included, or only the new
    tokens with an `attention_mask` that covers all; `reset()` it for another text. Mistakes in this that would give
    wrong text are caught as long as a cache of the model lives (see `kvcache.hf.guard`).

    Args:
        model: a transformers model that can generate, with full or sliding attention in every layer.
        max_tokens: tokens that fit, preallocated at the first use; None: as many as come, by growing buffers.
            With a `block_size` blocks are added as tokens come, either way.
        storage: how rows are kept, as in `kvcache.KVCache` ("bfloat16", "int8", "int8/int4" ...); default: as they
            come.
        block_size: keep the layers with full attention in blocks of so many tokens, which beams and repeated rows
            share until they part (`kvcache.PagedCache`); meant for models with `use_attention`, as the model's own
            attention needs a copy of all rows at each step. None: one run of memory for each row of the batch.

    Raises:
        InvalidTypeError: `model` is no transformers model that can generate.
        InvalidValueError: a layer is of a kind that is not supported, or an argument is out of range.

    Example::

        cache = kvcache.hf.cache_for(model)
        output = model.generate(**tokenizer("Once upon a time", return_tensors="pt"), cache=cache)
    """
    max_tokens = None if max_tokens is None else check_int("max_tokens", max_tokens, minimum=1)
    kept = None if storage is None else check_storage("storage", storage)
    block_size = None if block_size is None else check_int("block_size", block_size, minimum=1)
    config = _decoder_config(model)
    layers = _layers(config, max_tokens, kept, block_size)
    _warn_about_changing_positions(config, max_tokens)
    guard = guard_model(model)
    cache = ModelCache(layers, guard)
    if not model.config.is_encoder_decoder:
        return cache
    return EncoderDecoderModelCache(cache, ModelCache([FullLayer(None, kept) for _ in layers], guard, of_encoder=True))


def _decoder_config(model: Any) -> PreTrainedConfig:
    config: PreTrainedConfig = decoder_config(check_model(model).config)
    return config


def _layers(
    config: PreTrainedConfig, max_tokens: int | None, storage: Storage | None, block_size: int | None
) -> list[StoredLayer]:
    return [
        FullLayer(max_tokens, storage, block_size) if window is None else WindowLayer(window, max_tokens, storage)
        for window in layer_windows(config)
    ]


class UnchangedPositions(NamedTuple):
    """Up to how many tokens rotary positions of this type stay what they are for shorter texts."""

    rope_type: str
    num_tokens: int


def unchanged_positions(config: PreTrainedConfig) -> UnchangedPositions | None:
    """Return where the rotary base of a decoder begins to depend on the length; None where it never does."""
    parameters = getattr(config, "rope_parameters", None) or {}
    found = []
    for rope in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        kind = rope.get("rope_type") or ""
        if kind == "longrope":
            found.append(UnchangedPositions(kind, rope["original_max_position_embeddings"]))
        elif "dynamic" in kind:
            found.append(UnchangedPositions(kind, config.max_position_embeddings))
    return min(found, key=lambda positions: positions.num_tokens, default=None)


def _warn_about_changing_positions(config: PreTrainedConfig, max_tokens: int | None) -> None:
    """Warn where cached keys keep the rotary base of an earlier length."""
    unchanged = unchanged_positions(config)
    if unchanged is not None and (max_tokens is None or max_tokens > unchanged.num_tokens):
        kind, trained = unchanged
        warnings.warn(
            f"rotary positions of type {kind!r} change beyond {trained} tokens, but keys cached "
            "earlier keep the old ones, so results there differ from a run without a cache; "
            f"cache_for(model, max_tokens={trained}) stops before",
            stacklevel=3,
        )
