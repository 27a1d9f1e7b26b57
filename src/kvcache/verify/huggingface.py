"""Decoders of transformers, with any of its cache classes, as `verify` asks for them."""

import copy
import importlib
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import CacheLayerMixin

from kvcache.checks import check_bool
from kvcache.errors import InvalidTypeError, InvalidValueError, KVCacheError, NotSupportedError, RollbackError
from kvcache.hf import ModelCache, cache_for, use_attention
from kvcache.hf.guard import check_decoder_only
from kvcache.hf.versions import CACHE_ARGUMENT
from kvcache.storage.codecs import FloatCodec, Storage, StorageLike, check_storage
from kvcache.storage.model_config import decoder_config, layer_windows
from kvcache.verify.decoder import Decoder, ExchangedRows

CacheFactory = Callable[[PreTrainedModel, int], Cache]  # a model and the tokens that must fit -> an empty cache
BLOCK_SIZE = 16  # small, so that the texts take several blocks


@dataclass
class _Held:
    """A cache of transformers, and what its caller has to know to use it."""

    cache: Cache
    padding: torch.Tensor | None = None  # (B,)
    num_tokens: int = 0


class HuggingFaceDecoder(Decoder):
    """A transformers model that can generate, with a cache.

    Args:
        model: a decoder-only model.
        cache: "kvcache" (`kvcache.hf.cache_for`), "dynamic" or "static" (transformers' own), "package.module:factory"
            or a function: `factory(model, max_tokens)` returns an empty `transformers.Cache`.
        storage: how a "kvcache" keeps rows; default: as they come.
        attention: run with `kvcache.hf.use_attention(model)`, over blocks.
        is_lossy: whether a cache of your own rounds rows on purpose.

    Raises:
        InvalidTypeError, InvalidValueError: `model` is none of that kind, or an argument does not fit.
    """

    module: PreTrainedModel

    def __init__(
        self,
        model: PreTrainedModel,
        cache: str | CacheFactory = "kvcache",
        *,
        storage: StorageLike | None = None,
        attention: bool = False,
        is_lossy: bool = False,
    ) -> None:
        self.module = check_decoder_only(model)
        self.attention = check_bool("attention", attention)
        self.storage = None if storage is None else check_storage("storage", storage)
        is_own = callable(cache) or (isinstance(cache, str) and ":" in cache)
        for name, is_given, fits, expected in (
            ("storage", storage is not None, cache == "kvcache", "cache = 'kvcache'"),
            ("attention", attention, cache == "kvcache", "cache = 'kvcache'"),
            ("is_lossy", check_bool("is_lossy", is_lossy), is_own, "a cache of your own"),
        ):
            if is_given and not fits:
                raise InvalidValueError(f"{name} is given with cache = {cache!r}; it belongs to {expected}")
        if attention:
            use_attention(model).undo()  # refuses what it cannot do
        self._factory = _factory(cache, self.storage, attention)
        config = decoder_config(model.config)
        self.vocab_size = config.vocab_size
        self.max_tokens = getattr(config, "max_position_embeddings", None)
        try:
            windows = layer_windows(config)
        except InvalidValueError as error:
            raise InvalidValueError(
                f"model is a {type(model).__name__}; expected one with full or sliding attention in every layer, of "
                "which alone it is known what a token may see"
            ) from error
        self.windows = tuple(sorted({window for window in windows if window is not None}))
        self.is_lossy = is_lossy or loses(self.storage, self.dtype)

    def forward(
        self, tokens: torch.Tensor, cache: _Held | None = None, padding: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run tokens (B, T); return logits (B, T, vocabulary)."""
        if cache is None:
            return self._logits(input_ids=tokens, use_cache=False)
        inputs: dict[str, Any] = {"input_ids": tokens, "use_cache": True, CACHE_ARGUMENT: cache.cache}
        cache.padding = padding if padding is not None else cache.padding
        length = cache.num_tokens + tokens.shape[1]
        if cache.padding is not None:
            places = torch.arange(length, device=tokens.device)
            inputs["attention_mask"] = (places >= cache.padding[:, None]).long()
            inputs["position_ids"] = (places[cache.num_tokens :] - cache.padding[:, None]).clamp(min=0)
        with use_attention(self.module) if self.attention else nullcontext():
            logits = self._logits(**inputs)
        cache.num_tokens = length
        return logits

    def new_cache(self, batch_size: int, capacity: int) -> _Held:
        """Return an empty cache of the kind that is verified."""
        try:
            cache = self._factory(self.module, capacity)
        except KVCacheError:
            raise
        except Exception as error:
            raise InvalidValueError(
                f"the cache factory raised {type(error).__name__}: {error}; it is called as factory(model, max_tokens)"
            ) from error
        if not isinstance(cache, Cache):
            raise InvalidTypeError(
                f"the cache factory returned a {type(cache).__name__}; expected a transformers Cache"
            )
        return _Held(cache)

    def rollback(self, cache: _Held, num_tokens: int) -> None:
        """Crop the cache."""
        name = type(cache.cache).__name__
        if not (hasattr(cache.cache, "crop") and all(layer.is_croppable for layer in cache.cache.layers)):
            raise NotSupportedError(f"{name} cannot be cropped")
        try:
            cache.cache.crop(-num_tokens)
        except (RollbackError, RuntimeError) as error:  # ours, and that of transformers' windows that have wrapped
            if not self.windows:
                raise
            raise NotSupportedError(f"{name}.crop: {error}") from error
        cache.num_tokens -= num_tokens

    def reorder(self, cache: _Held, index: torch.Tensor) -> None:
        """Reorder the batch, as beam search does."""
        cache.cache.reorder_cache(index)  # type: ignore[arg-type]
        if cache.padding is not None:
            cache.padding = cache.padding[index]

    def fork(self, cache: _Held) -> _Held:
        """Return a fork where the cache has one, else a deep copy."""
        if isinstance(cache.cache, ModelCache):
            return replace(cache, cache=cache.cache.fork())
        return copy.deepcopy(cache)

    def restore(self, saved: bytes) -> _Held:
        """Unpickle, and say to which model it belongs."""
        held: _Held = pickle.loads(saved)
        if isinstance(held.cache, ModelCache):
            held.cache.attach(self.module)
        return held

    def forward_through_codec(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """Run whole texts with keys and values rounded as the storage rounds them."""
        return None if self.storage is None else logits_through_codec(self.module, self.storage, tokens)

    def exchanged_rows(self, tokens: torch.Tensor) -> list[ExchangedRows]:
        """Run whole texts with a new cache; return what each layer gave it and got back."""
        cache = self.new_cache(len(tokens), tokens.shape[1]).cache
        exchanged: dict[int, ExchangedRows] = {}
        update = cache.update

        def recorded(k: torch.Tensor, v: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            returned = update(k, v, layer_idx, *args, **kwargs)
            exchanged[layer_idx] = ExchangedRows((k, v), returned)
            return returned

        cache.update = recorded  # type: ignore[assignment, method-assign]
        self._logits(input_ids=tokens, use_cache=True, **{CACHE_ARGUMENT: cache})
        return [exchanged[index] for index in sorted(exchanged)]

    def layers(self) -> list[nn.Module]:
        """Return the decoder's layers."""
        count = decoder_config(self.module.config).num_hidden_layers
        lists = [list(part) for part in self.module.modules() if isinstance(part, nn.ModuleList)]
        return next((layers for layers in lists if len(layers) == count), [])

    def _logits(self, **inputs: Any) -> torch.Tensor:
        logits: torch.Tensor = self.module(**inputs).logits
        return logits


def loses(storage: Storage | None, dtype: torch.dtype) -> bool:
    """Whether rows of a dtype lose something where they are kept; None: as they come."""
    if storage is None:
        return False
    eps = torch.finfo(dtype).eps
    return any(not isinstance(c, FloatCodec) or torch.finfo(c.dtype).eps > eps for c in (storage.k, storage.v))


def logits_through_codec(model: PreTrainedModel, storage: Storage, tokens: torch.Tensor) -> torch.Tensor:
    """Run whole texts (B, T) without a cache, keys and values rounded as the storage rounds them."""
    layers: list[Any] = [_RoundingLayer(storage, window) for window in layer_windows(decoder_config(model.config))]
    logits: torch.Tensor = model(input_ids=tokens, use_cache=True, **{CACHE_ARGUMENT: Cache(layers=layers)}).logits
    return logits


def _factory(cache: str | CacheFactory, storage: Storage | None, attention: bool) -> CacheFactory:
    if callable(cache):
        return cache
    if not isinstance(cache, str):
        raise InvalidTypeError(f"cache is a {type(cache).__name__}; expected a name or a function")
    if cache == "kvcache":
        block_size = BLOCK_SIZE if attention else None
        return lambda model, tokens: cache_for(model, tokens, storage=storage, block_size=block_size)
    if cache == "dynamic":
        return lambda model, tokens: DynamicCache(config=model.config)
    if cache == "static":
        return lambda model, tokens: StaticCache(config=model.config, max_cache_len=tokens)
    if ":" not in cache:
        raise InvalidValueError(f"cache is {cache!r}; expected kvcache, dynamic, static or package.module:factory")
    return import_factory(cache)


def import_factory(path: str) -> CacheFactory:
    """Return the function that "package.module:factory" names.

    Raises:
        InvalidTypeError, InvalidValueError: it cannot be imported, or is no function.
    """
    module_name, _, name = path.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), name)
    except Exception as error:
        raise InvalidValueError(f"cache is {path!r}, which cannot be imported: {error}") from error
    if not callable(factory):
        raise InvalidTypeError(f"cache is {path!r}, which is a {type(factory).__name__}; expected a function")
    made: CacheFactory = factory
    return made


class _RoundingLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keeps nothing: gives back the rows of the one forward, rounded as a storage rounds them."""

    is_croppable = False

    def __init__(self, storage: Storage, window: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storage = storage
        self.is_sliding = window is not None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (
            codec.decode(codec.encode(rows), rows.shape[-1], rows.dtype)
            for codec, rows in zip((self.storage.k, self.storage.v), (key_states, value_states), strict=True)
        )
        return k, v

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1
