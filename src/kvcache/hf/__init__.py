"""Hugging Face transformers: a drop-in cache for its decoders, and loading of models."""

from kvcache.hf.cache import cache_for
from kvcache.hf.models import load_model

__all__ = ["cache_for", "load_model"]
