"""Hugging Face transformers: a drop-in cache for its decoders, and loading of models."""

try:
    import transformers as _transformers  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"kvcache.hf needs {error.name}: pip install 'torch-kvcache[hf]'", name=error.name
    ) from error
else:
    from kvcache.hf.versions import check_transformers

    check_transformers()

from kvcache.hf.attention import FusedAttention, use_attention
from kvcache.hf.cache import EncoderDecoderModelCache, ModelCache, cache_for
from kvcache.hf.models import LoadedModel, load_model
from kvcache.hf.native_decoder import NativeDecoder
from kvcache.hf.pooled import forward_step
from kvcache.hf.session import Completion, Session
from kvcache.hf.turn import Usage

__all__ = [
    "Completion",
    "EncoderDecoderModelCache",
    "FusedAttention",
    "LoadedModel",
    "ModelCache",
    "NativeDecoder",
    "Session",
    "Usage",
    "cache_for",
    "forward_step",
    "load_model",
    "use_attention",
]
