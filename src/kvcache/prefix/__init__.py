"""Which blocks can be reused: keys, index, eviction, fingerprint of weights."""

from kvcache.prefix.cache import PrefixCache
from kvcache.prefix.content import Media
from kvcache.prefix.eviction import first_in_first_out, least_recently_used
from kvcache.prefix.lookup import Lookup, LookupEnd
from kvcache.prefix.nodes import KeptBlock
from kvcache.prefix.statistics import PrefixStatistics
from kvcache.prefix.weights import WeightsGuard, fingerprint

__all__ = [
    "KeptBlock",
    "Lookup",
    "LookupEnd",
    "Media",
    "PrefixCache",
    "PrefixStatistics",
    "WeightsGuard",
    "fingerprint",
    "first_in_first_out",
    "least_recently_used",
]
