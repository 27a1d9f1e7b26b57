"""Is a cache right? A model with it against the same model without one, and which fault explains a difference."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvcache.verify.decoder import Decoder, ExchangedRows
from kvcache.verify.report import Corruption, Finding, Report, Verdict
from kvcache.verify.verification import verify

if TYPE_CHECKING:
    from kvcache.verify.huggingface import HuggingFaceDecoder
    from kvcache.verify.native import NativePoolDecoder

__all__ = [
    "Corruption",
    "Decoder",
    "ExchangedRows",
    "Finding",
    "HuggingFaceDecoder",
    "NativePoolDecoder",
    "Report",
    "Verdict",
    "verify",
]

_WITH_TRANSFORMERS = {
    "HuggingFaceDecoder": "kvcache.verify.huggingface",
    "NativePoolDecoder": "kvcache.verify.native",
}


def __getattr__(name: str) -> Any:
    """Look up what needs transformers only when it is asked for."""
    if name in _WITH_TRANSFORMERS:
        return getattr(import_module(_WITH_TRANSFORMERS[name]), name)
    raise AttributeError(f"module 'kvcache.verify' has no attribute {name!r}")
