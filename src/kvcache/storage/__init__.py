"""Where keys and values are kept: the caches of one layer."""

from kvcache.storage.contiguous import KVCache
from kvcache.storage.layer import LayerCache
from kvcache.storage.window import SlidingWindowCache

__all__ = ["KVCache", "LayerCache", "SlidingWindowCache"]
