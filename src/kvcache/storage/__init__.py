"""Where keys and values are kept: caches of one layer, and a pool of blocks for many sequences of a model."""

from kvcache.storage.codecs import EncodedRows
from kvcache.storage.contiguous import KVCache
from kvcache.storage.layer import LayerCache
from kvcache.storage.paged import PagedCache
from kvcache.storage.pool import BlockPool
from kvcache.storage.sequence import Sequence
from kvcache.storage.specs import CacheSpec, LayerSpec
from kvcache.storage.step import Step
from kvcache.storage.window import SlidingWindowCache

__all__ = [
    "BlockPool",
    "CacheSpec",
    "EncodedRows",
    "KVCache",
    "LayerCache",
    "LayerSpec",
    "PagedCache",
    "Sequence",
    "SlidingWindowCache",
    "Step",
]
