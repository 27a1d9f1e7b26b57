"""Decoders of transformers run by this package's own decode path over a pool, as `verify` asks for them."""

import copy
from typing import Self

import torch
from torch import nn
from transformers import PreTrainedModel

from kvcache.decoder import Linear
from kvcache.decoder.weights import WeightMemory, Weights, in_int8
from kvcache.errors import NotSupportedError, RollbackError
from kvcache.hf.guard import check_decoder_only
from kvcache.hf.native_decoder import NativeDecoder
from kvcache.storage import BlockPool, CacheSpec, Sequence
from kvcache.storage.codecs import StorageLike, check_storage
from kvcache.storage.model_config import decoder_config
from kvcache.verify.decoder import Decoder
from kvcache.verify.huggingface import BLOCK_SIZE, logits_through_codec, loses

MANY_FROM = 25  # tokens of a step, so that prompts run the one way, and chunks and what is decoded the other
Cache = list[Sequence]  # one for each text, all of one pool


class NativePoolDecoder(Decoder):
    """A transformers model that `kvcache.hf.NativeDecoder` runs over a `BlockPool`; without a cache it runs itself.

    The decode path has no float64. Where the reference is in float64, the same weights run in float32, over rows in
    float32: rows that differ in the last bit are now and then rounded to other codes, which would look like a fault.

    Args:
        model: as `NativeDecoder` takes it.
        storage: how rows are kept; default: in the dtype of the weights.
        weights: "int8" to run int8 weights. They are held against a run without a cache of the weights that their
            codes stand for.

    Raises:
        NotSupportedError: `NativeDecoder` does not take the model.
        InvalidTypeError, InvalidValueError: `model` is no transformers decoder, or an argument does not fit.
    """

    module: PreTrainedModel

    def __init__(
        self, model: PreTrainedModel, *, storage: StorageLike | None = None, weights: Weights | None = None
    ) -> None:
        self.module = check_decoder_only(model)
        self.storage = None if storage is None else check_storage("storage", storage)
        self.weights = weights
        self._native: NativeDecoder | None = NativeDecoder(model, weights=weights, many_from=MANY_FROM)
        self._coded: PreTrainedModel | None = None
        config = decoder_config(model.config)
        self.vocab_size = config.vocab_size
        self.max_tokens = getattr(config, "max_position_embeddings", None)
        self._spec = CacheSpec.from_config(model.config)
        self.windows = tuple(sorted({layer.window for layer in self._spec.layers if layer.window is not None}))
        self.is_lossy = weights is not None or loses(self.storage, self.dtype)

    def forward(
        self, tokens: torch.Tensor, cache: Cache | None = None, padding: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run tokens (B, T); return logits (B, T, vocabulary). Padding is left out, and its logits are zeros."""
        if cache is None:
            logits: torch.Tensor = self.module(input_ids=tokens, use_cache=False).logits
            return logits
        num_new = tokens.shape[1]
        starts = [0] * len(cache) if padding is None else padding.tolist()
        texts = [row[start:] for row, start in zip(tokens.tolist(), starts, strict=True)]
        is_real = torch.arange(num_new) >= torch.tensor(starts)[:, None]
        with cache[0].pool.step(cache, texts) as step:
            found = self._native_decoder().forward_step(step, torch.arange(sum(map(len, texts))))
        outputs = found.new_zeros(len(cache), num_new, found.shape[1])
        outputs[is_real] = found
        return outputs

    def new_cache(self, batch_size: int, capacity: int) -> Cache:
        """Return sequences of a new pool with room for so many tokens each, in whole blocks."""
        num_blocks = batch_size * -(-capacity // BLOCK_SIZE)
        storage = self.cached_dtype if self.storage is None else self.storage
        pool = BlockPool(self._spec, num_blocks, BLOCK_SIZE, storage)
        return [pool.new_sequence() for _ in range(batch_size)]

    def rollback(self, cache: Cache, num_tokens: int) -> None:
        """Roll every sequence back."""
        try:
            for sequence in cache:
                sequence.rollback(num_tokens)
        except RollbackError as error:
            raise NotSupportedError(str(error)) from error

    def reorder(self, cache: Cache, index: torch.Tensor) -> None:
        """Let forks of the sequences take their places."""
        forks = [cache[row].fork() for row in index.tolist()]
        for sequence in cache:
            sequence.free()
        cache[:] = forks

    def fork(self, cache: Cache) -> Cache:
        """Return forks in the same pool."""
        return [sequence.fork() for sequence in cache]

    def forward_through_codec(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """Run whole texts with the weights that int8 codes stand for, and rows rounded as the storage rounds them."""
        if self.storage is None and not self.is_lossy:
            return None
        model = self.module if self.weights is None else self._coded_module()
        if self.storage is not None:
            return logits_through_codec(model, self.storage, tokens)
        logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
        return logits

    @property
    def cached_dtype(self) -> torch.dtype:
        """The dtype of the weights, but float32 for float64, which the decode path does not have."""
        return torch.float32 if self.dtype == torch.float64 else self.dtype

    def copied(self, dtype: torch.dtype) -> Self:
        """Return the same decoder over a copy of its module; in another dtype, rows are kept as they come."""
        other = super().copied(dtype)
        other._native = other._coded = None
        if dtype != self.dtype:
            other.storage = None
        return other

    def layers(self) -> list[nn.Module]:
        """Return none: what goes from layer to layer is not seen."""
        return []

    def _native_decoder(self) -> NativeDecoder:
        if self._native is None:
            model = self.module
            if self.dtype != self.cached_dtype:
                model = copy.deepcopy(model).float()  # type: ignore[no-untyped-call]
            products = self.cached_dtype if self.cached_dtype == torch.float32 else None
            self._native = NativeDecoder(model, weights=self.weights, product_dtype=products, many_from=MANY_FROM)
        return self._native

    def _coded_module(self) -> PreTrainedModel:
        """Return a copy of the module with the weights that int8 codes stand for."""
        if self._coded is None:
            self._coded = copy.deepcopy(self.module)
            for part in self._coded.modules():
                if type(part) is nn.Linear:
                    weight = WeightMemory(torch.float32).decoded(in_int8(Linear(part.weight)))
                    part.weight = nn.Parameter(weight.to(self.dtype))  # a tied one leaves the embeddings as they are
        return self._coded
