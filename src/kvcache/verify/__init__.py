"""Is a cache right? A model with it against the same model without one, and which fault explains a difference."""

from typing import TYPE_CHECKING, Any

from kvcache.verify.decoder import Decoder, ExchangedRows
from kvcache.verify.report import Corruption, Finding, Report, Verdict
from kvcache.verify.verification import verify

if TYPE_CHECKING:
    from kvcache.verify.huggingface import HuggingFaceDecoder

__all__ = [
    "Corruption",
    "Decoder",
    "ExchangedRows",
    "Finding",
    "HuggingFaceDecoder",
    "Report",
    "Verdict",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Look up `HuggingFaceDecoder`, which needs transformers, only when it is asked for."""
    if name == "HuggingFaceDecoder":
        from kvcache.verify.huggingface import HuggingFaceDecoder

        return HuggingFaceDecoder
    raise AttributeError(f"module 'kvcache.verify' has no attribute {name!r}")
