"""Hugging Face transformers: a drop-in cache for its decoders, and loading of models."""

from kvcache.hf.cache import EncoderDecoderModelCache, ModelCache, cache_for
from kvcache.hf.models import LoadedModel, load_model

__all__ = ["EncoderDecoderModelCache", "LoadedModel", "ModelCache", "cache_for", "load_model"]
