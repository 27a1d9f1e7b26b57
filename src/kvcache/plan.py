"""What fits into a machine's memory, and how fast a decode step can be at best: arithmetic from a model's sizes alone.

A step of B sequences reads every weight once and each sequence's visible keys and values once, so that

    bytes    weights + B * rows that the newest token sees * bytes of a row       FLOPs    see `Plan.step_flops`
    seconds  max(bytes / bandwidth, FLOPs / compute)

which no step can be faster than ("roofline": Williams, Waterman and Patterson, CACM 52(4), 2009). Left out: the bytes
that a step writes, activations and logits, and what a long prompt needs while it is processed.
"""

import sys
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvcache.checks import check_dtype, check_float, check_int
from kvcache.costs import count_qkv_projections
from kvcache.errors import InvalidTypeError, InvalidValueError
from kvcache.storage.codecs import Storage, StorageLike, check_storage
from kvcache.storage.specs import CacheSpec


@dataclass(frozen=True)
class ModelSizes:
    """What a model's configuration says of its size.

    Args:
        cache: what each layer keeps of a token.
        query_heads: query heads H of each layer.
        num_parameters: of the whole model, tied ones once: what has to be in memory.
        num_step_parameters: those that every decode step reads: without experts, look-up tables (of which a token
            reads one row) and parts that are no text decoder.
        num_expert_parameters: of all experts of all layers; 0 without experts.
        num_experts: experts of a layer.
        experts_per_token: of those, how many a token is sent to.
        max_positions: the longest text that the model is made for, None if it does not tell.

    Raises:
        InvalidValueError, InvalidTypeError: a size is out of range or no integer.
    """

    cache: CacheSpec
    query_heads: tuple[int, ...]
    num_parameters: int
    num_step_parameters: int
    num_expert_parameters: int = 0
    num_experts: int = 1
    experts_per_token: int = 1
    max_positions: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.cache, CacheSpec):
            raise InvalidTypeError(f"cache is a {type(self.cache).__name__}; expected a CacheSpec")
        if len(self.query_heads) != len(self.cache.layers):
            raise InvalidValueError(
                f"query_heads has {len(self.query_heads)} entries; expected one for each of the "
                f"{len(self.cache.layers)} layers"
            )
        object.__setattr__(self, "query_heads", tuple(check_int("query_heads", n, minimum=1) for n in self.query_heads))
        for name in ("num_parameters", "num_experts", "experts_per_token"):
            check_int(name, getattr(self, name), minimum=1)
        for name in ("num_step_parameters", "num_expert_parameters"):
            check_int(name, getattr(self, name), minimum=0)

    def pair_flops(self) -> Iterator[tuple[int | None, int]]:
        """Yield for each layer the rows that a query sees at most (None: all) and the FLOPs of a query and one row.

        Those are `2 * H * (D + Dv)`: a multiplication and an addition for each channel of the key and of the value.
        """
        for layer, heads in zip(self.cache.layers, self.query_heads, strict=True):
            yield _limit(layer.window, layer.sinks), 2 * heads * sum(layer.head_dims)


@dataclass(frozen=True)
class Machine:
    """What a machine has.

    Args:
        memory: bytes for weights and cache.
        bandwidth: bytes a second that its memory can be read with.
        compute: FLOPs a second; None: not known, and left out.

    Raises:
        InvalidValueError, InvalidTypeError: a number is not above 0, or none.
    """

    memory: int
    bandwidth: float
    compute: float | None = None

    def __post_init__(self) -> None:
        check_int("memory", self.memory, minimum=1)
        for name in ("bandwidth", "compute"):
            value = getattr(self, name)
            if (name == "bandwidth" or value is not None) and check_float(name, value) <= 0:
                raise InvalidValueError(f"{name} is {value}; expected a number above 0")


@dataclass(frozen=True)
class Plan:
    """A model that decodes `batch` sequences of `context` tokens each on a machine.

    Args:
        model, machine: see there.
        context: tokens of a sequence, the newest included, >= 1.
        batch: sequences, >= 1.
        dtype: of the weights: float16, bfloat16, float32 or float64, or its name.
        storage: how rows are kept: see `KVCache`. Default: `dtype`.
        block_size: keep rows in whole blocks of so many tokens, as a `BlockPool` does; default: exactly the rows.

    Raises:
        InvalidValueError, InvalidTypeError: an argument is out of range or of the wrong kind.

    >>> from kvcache import LayerSpec
    >>> layers = CacheSpec([LayerSpec(num_heads=3, head_dim=64)] * 30)
    >>> smollm2 = ModelSizes(layers, query_heads=(9,) * 30, num_parameters=134_515_008, num_step_parameters=134_515_008)
    >>> plan = Plan(smollm2, Machine(memory=2**30, bandwidth=20e9), context=2048, batch=4, dtype="bfloat16")
    >>> plan.weights_nbytes, plan.cache_nbytes, plan.sequences_that_fit
    (269030016, 188743680, 17)
    >>> round(plan.step_seconds * 1000, 1), round(plan.tokens_per_second)
    (22.9, 175)
    """

    model: ModelSizes
    machine: Machine
    context: int
    batch: int = 1
    dtype: torch.dtype | str = torch.float32
    storage: StorageLike | None = None
    block_size: int | None = None

    def __post_init__(self) -> None:
        for name, value, kind in (("model", self.model, ModelSizes), ("machine", self.machine, Machine)):
            if not isinstance(value, kind):
                raise InvalidTypeError(f"{name} is a {type(value).__name__}; expected a {kind.__name__}")
        check_int("context", self.context, minimum=1)
        check_int("batch", self.batch, minimum=1)
        dtype = check_dtype("dtype", self.dtype)
        object.__setattr__(self, "dtype", dtype)
        storage = check_storage("storage", dtype if self.storage is None else self.storage)
        object.__setattr__(self, "storage", storage)
        if self.block_size is not None:
            check_int("block_size", self.block_size, minimum=1)

    @property
    def codecs(self) -> Storage:
        """How keys and values are kept."""
        return check_storage("storage", self.storage)

    @property
    def itemsize(self) -> int:
        """Bytes of a weight."""
        return check_dtype("dtype", self.dtype).itemsize

    @property
    def weights_nbytes(self) -> int:
        """Bytes of all weights: `num_parameters * itemsize`."""
        return self.model.num_parameters * self.itemsize

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return self.model.cache.token_nbytes(self.codecs)

    @property
    def cache_nbytes_by_kind(self) -> dict[str, int]:
        """Bytes of the cache in the layers of each kind there is."""
        return {kind: self.batch * self._sequence_nbytes(self.context, kind) for kind in self.model.cache.kinds}

    @property
    def cache_nbytes(self) -> int:
        """Bytes of the cache: `batch` times, for each layer, the rows it keeps times the bytes of a row."""
        return sum(self.cache_nbytes_by_kind.values())

    @property
    def missing_nbytes(self) -> int:
        """Bytes by which weights and cache are larger than the memory; 0 or less where they fit."""
        return self.weights_nbytes + self.cache_nbytes - self.machine.memory

    @property
    def cache_room(self) -> int:
        """Bytes of memory that the weights leave."""
        return max(0, self.machine.memory - self.weights_nbytes)

    @property
    def longest_context(self) -> int | None:
        """Tokens of each of `batch` sequences that fit behind the weights; None: any number, as all layers slide."""
        room = self.cache_room // self.batch
        if self._sequence_nbytes(sys.maxsize) <= room:
            return None
        growing = "full" if "full" in self.model.cache.kinds else None
        upper_bound = room // self.model.cache.token_nbytes(self.codecs, growing)
        return bisect_right(range(1, upper_bound + 1), room, key=self._sequence_nbytes)

    @property
    def sequences_that_fit(self) -> int:
        """Sequences of `context` tokens that fit behind the weights."""
        return self.cache_room // self._sequence_nbytes(self.context)

    @property
    def step_nbytes(self) -> int:
        """Bytes that a decode step reads: the weights once, and of each sequence the rows that its newest token sees.

        With experts: those that the tokens are sent to, as if no two chose the same one while there are others.
        """
        model = self.model
        share = min(model.num_experts, self.batch * model.experts_per_token)
        weights = model.num_step_parameters + model.num_expert_parameters * share // model.num_experts
        return weights * self.itemsize + self.batch * model.cache.kept_nbytes(self.context, self.codecs)

    @property
    def step_flops(self) -> int:
        """FLOPs of a decode step: `batch` times two for each weight that a token meets, and those of attention.

        Attention takes `2 * H * (D + Dv)` for each layer and row that the newest token sees.
        """
        model = self.model
        weights = model.num_step_parameters + model.num_expert_parameters * model.experts_per_token // model.num_experts
        attention = sum(flops * _clip(self.context, limit) for limit, flops in model.pair_flops())
        return self.batch * (2 * weights + attention)

    @property
    def step_seconds(self) -> float:
        """Seconds that a decode step takes at best: what takes longer, reading or computing (where it is known)."""
        reading = self.step_nbytes / self.machine.bandwidth
        return reading if self.machine.compute is None else max(reading, self.step_flops / self.machine.compute)

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all sequences a second, at best."""
        return self.batch / self.step_seconds

    def _sequence_nbytes(self, context: int, kind: str | None = None) -> int:
        return self.model.cache.kept_nbytes(context, self.codecs, kind, block_size=self.block_size)


@dataclass(frozen=True)
class DecodingWork:
    """What decoding one sequence from an empty start computes.

    Attributes:
        qkv_projections: query, key and value projections of single tokens, in all layers.
        attention_flops: FLOPs of attention, in all layers.
    """

    qkv_projections: int
    attention_flops: int


def decoding_work(model: ModelSizes, num_tokens: int, *, use_cache: bool) -> DecodingWork:
    """Return what decoding `num_tokens` tokens from an empty start computes; see `count_qkv_projections`.

    With a cache step t computes one token's projections, and attention of one query over `min(t, sinks + window)` rows;
    the sum over all steps is N (N + 1) / 2 rows without a window. Without a cache step t does so for each of its t
    tokens again: N (N + 1) (N + 2) / 6 rows.

    Raises:
        InvalidValueError, InvalidTypeError: `num_tokens` is negative or no integer, or `use_cache` no bool.
    """
    projections = count_qkv_projections(0, num_tokens, use_cache)["total_projections"]
    pairs = _pairs_with_cache if use_cache else _pairs_without_cache
    attention = sum(flops * pairs(num_tokens, limit) for limit, flops in model.pair_flops())
    return DecodingWork(projections * len(model.cache.layers), attention)


def _pairs_with_cache(num_tokens: int, limit: int | None) -> int:
    """The sum of min(t, limit) over t = 1 .. num_tokens."""
    rising = _clip(num_tokens, limit)
    return rising * (rising + 1) // 2 + (num_tokens - rising) * rising


def _pairs_without_cache(num_tokens: int, limit: int | None) -> int:
    """The sum of `_pairs_with_cache(t, limit)` over t = 1 .. num_tokens."""
    rising = _clip(num_tokens, limit)
    later = num_tokens - rising
    return (
        rising * (rising + 1) * (rising + 2) // 6
        + later * rising * (rising + 1) // 2
        + rising * later * (later + 1) // 2
    )


def _limit(window: int | None, sinks: int) -> int | None:
    return None if window is None else sinks + window


def _clip(num_tokens: int, limit: int | None) -> int:
    return num_tokens if limit is None else min(num_tokens, limit)
