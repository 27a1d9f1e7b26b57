"""What a prefix cache has done so far: what was asked for, counted when it was, and what steps have really read."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class PrefixStatistics:
    """A snapshot.

    Attributes:
        num_lookups: texts that were acquired.
        num_hits: those of them of which a step has read tokens that were found.
        num_tokens: tokens of all these texts.
        num_reused: tokens that were found, and read by a step.
        num_published: nodes that came to be kept: whole blocks, and short last ones, with all kinds of layers.
        num_evicted: blocks of each kind that went because room was needed, or by `PrefixCache.evict`.
        num_kept: blocks of each kind that are kept now, in use or not.
        ends: why no more was found (see `LookupEnd`), and how often.
    """

    num_lookups: int
    num_hits: int
    num_tokens: int
    num_reused: int
    num_published: int
    num_evicted: Mapping[str, int]
    num_kept: Mapping[str, int]
    ends: Mapping[str, int]
