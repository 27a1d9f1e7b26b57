"""Attention of new queries over stored keys and values."""

from kvcache.attention.dispatch import attend
from kvcache.attention.merge import merge_attention

__all__ = ["attend", "merge_attention"]
