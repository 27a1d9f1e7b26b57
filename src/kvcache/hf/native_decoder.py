"""Decoders like Llama run by this package's own kernels over steps of a pool, from the weights of the loaded model."""

from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch
from transformers import PreTrainedModel

from kvcache import native
from kvcache.checks import check_int
from kvcache.decoder import DecoderDescription, FewRows, Linear, ManyRows
from kvcache.decoder.rotary import RotaryTables
from kvcache.decoder.weights import Weights, in_int8
from kvcache.errors import InvalidValueError, NotSupportedError
from kvcache.hf.describe import DTYPES, describe
from kvcache.hf.pooled import check_step_of, checked_places, forward_step
from kvcache.storage import BlockPool, CacheSpec, Sequence
from kvcache.storage.codecs import GROUP_SIZE
from kvcache.storage.step import Step

LOOK_EVERY = 8  # steps of single tokens; a look takes 4 % of a step of a small model
_TRIED = 5  # tokens that are run both ways
_TOLERANCE = 0.1  # of the logits' norm: rounding in 16 bits stays well below, another function does not


class NativeDecoder:
    """Runs a decoder over steps of a pool as `forward_step` does, near the speed at which memory gives its weights.

    The weights are the model's own, not copies. In float32 results equal transformers' to rounding; with 16-bit weights
    what is between them is float32, so they are nearer to a run in float64 than transformers' are. What is done to the
    weights in place holds from the next step on. Parts of the model that are exchanged are noticed at the next step
    that has a new text or several tokens of one, or after 8 steps, and read anew. No gradient flows.

    Args:
        model: of Llama's kind (Llama, SmolLM2, Mistral, Qwen2, Qwen3, Gemma, Gemma2, Gemma3), on the CPU, all weights
            in float32, bfloat16 or float16.
        weights: "int8" to keep a copy of the matrices in int8, with a scale for 32 weights of a row: half of what a
            step reads of them in 16 bits. Default: as they are.
        product_dtype: of the matrix products of steps with many tokens; default: the fastest for these weights on this
            processor, which for 16-bit and int8 weights may be bfloat16.
        many_from: tokens of a step from which on PyTorch multiplies; default: from where that is faster.

    Raises:
        NotSupportedError: the model does not fit, and which part of it; or there are no native kernels.
        InvalidValueError, InvalidTypeError: another argument is something else.

    Example::

        decoder = kvcache.hf.NativeDecoder(model)
        pool = kvcache.BlockPool(kvcache.CacheSpec.from_config(model.config), num_blocks=64, block_size=64)
        sequence = pool.new_sequence()
        with pool.step([sequence], [ids]) as step:
            logits = decoder.forward_step(step)
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        weights: Weights | None = None,
        product_dtype: torch.dtype | None = None,
        many_from: int | None = None,
    ) -> None:
        if weights not in (None, "int8"):
            raise InvalidValueError(f"weights is {weights!r}; expected None or 'int8'")
        if product_dtype not in (None, *DTYPES):
            raise InvalidValueError(f"product_dtype is {product_dtype}; expected one of {DTYPES}")
        if many_from is not None:
            check_int("many_from", many_from, minimum=1)
        if native.kernels is None:
            raise NotSupportedError(f"the native CPU kernels are not there ({native.missing_because})")
        self._model = model
        self._weights = weights
        self._product_dtype = product_dtype
        self._many_from = many_from
        self._steps_since_look = 0
        self._under_way: WeakSet[Sequence] = WeakSet()  # texts for which the model was looked at
        self._pools: WeakSet[BlockPool] = WeakSet()  # that were found to be for this model
        self._read()

    @property
    def description(self) -> DecoderDescription:
        """What is run, as plain data."""
        return self._description

    @torch.no_grad()
    def forward_step(self, step: Step, places: torch.Tensor | None = None) -> torch.Tensor:
        """Run a step's new tokens and return logits (R, vocabulary), float32.

        It stores the new rows in every layer; to commit the step, or to abort it where this raises, is left to the
        `with` that holds it.

        Args:
            step: open, with no layer appended, of a pool whose spec is `CacheSpec.from_config(model.config)`.
            places: (R,) int64, the tokens among the step's N new ones whose logits are wanted; default: each sequence's
                last.

        Raises:
            InvalidTypeError, InvalidValueError: as `kvcache.hf.forward_step`, or `places` are no integers, or not of
                these tokens. Nothing has been stored.
            NotSupportedError: the model was changed meanwhile, and does not fit any more.
        """
        self._check(step)
        if places is not None:
            places = checked_places(places, step)
        self._steps_since_look += 1
        is_under_way = max(step.num_tokens) == 1 and all(sequence in self._under_way for sequence in step.sequences)
        if self._steps_since_look >= LOOK_EVERY or not is_under_way:
            if self._has_changed():
                self._read()
            self._steps_since_look = 0  # only now: where the model is refused, the next step looks again
            self._under_way.update(step.sequences)
        return self._run(step, places)

    def _check(self, step: Step) -> None:
        if isinstance(step, Step) and step.pool in self._pools:
            owner = getattr(step.pool.observer, "model", self._model)
            limit = self._description.max_positions
            if owner is self._model and (limit is None or step.longest <= limit):  # what can change
                step.check_open()
                return
        check_step_of(self._model, step)
        self._pools.add(step.pool)

    def _run(self, step: Step, places: torch.Tensor | None) -> torch.Tensor:
        many_from = self._many.worth_it if self._many_from is None else self._many_from
        if sum(step.num_tokens) < many_from and _kernels_take(step.pool):
            return self._few.run(step, places)
        return self._many.run(step, places)

    def _has_changed(self) -> bool:
        return not self._parts.are_the_same or (self._weights is not None and self._parts.versions != self._versions)

    def _read(self) -> None:
        description, parts = describe(self._model)
        ways = self._ways(description)
        self._try(ways)
        versions = parts.versions
        if self._weights is not None:
            description = _compressed(description)
            ways = self._ways(description)
        self._pools.clear()
        # Only now, so that a model that does not fit any more is read, and refused, in every step.
        self._description, self._parts, self._versions, (self._few, self._many) = description, parts, versions, ways

    def _ways(self, description: DecoderDescription) -> tuple[FewRows, ManyRows]:
        tables = RotaryTables(description.rotary, description.max_positions)
        return FewRows(description, tables), ManyRows(description, tables, self._product_dtype)

    @torch.no_grad()
    def _try(self, ways: tuple[FewRows, ManyRows]) -> None:
        """Check that a few tokens have the logits of the model's own forward: what nobody thought of shows there."""
        model: Any = self._model
        spec = CacheSpec.from_config(model.config)
        ids = [index % model.config.get_text_config(decoder=True).vocab_size for index in range(_TRIED)]
        pool = BlockPool(spec, num_blocks=_TRIED, block_size=1, storage=model.dtype, device=model.device)
        try:
            expected = _logits(pool, ids, lambda step: forward_step(model, step))
        except InvalidValueError as error:
            raise NotSupportedError(str(error)) from error
        for way in ways:
            difference, whole = (_logits(pool, ids, way.run) - expected).norm(), expected.norm()
            if not difference <= _TOLERANCE * whole:
                raise NotSupportedError(
                    f"the model's own forward gives other logits than its parts do: they are {difference:.3g} apart, "
                    f"expected at most {_TOLERANCE:g} of their norm, {whole:.3g}"
                )


def _logits(pool: BlockPool, ids: list[int], run: Any) -> torch.Tensor:
    with pool.new_sequence() as sequence:
        step = pool.step([sequence], [ids])
        try:
            logits: torch.Tensor = run(step).float()
        finally:
            step.abort()
    return logits


def _kernels_take(pool: BlockPool) -> bool:
    return all(number is not None for number in pool.stores[0].formats)


def _compressed(description: DecoderDescription) -> DecoderDescription:
    layers = []
    for index, layer in enumerate(description.layers):
        matrices: dict[str, Any] = {
            name: _int8(f"layer {index}, {name}", linear) for name, linear in layer.linears.items()
        }
        layers.append(replace(layer, **matrices))
    return replace(description, layers=tuple(layers), head=_int8("the head", description.head))


def _int8(where: str, linear: Linear) -> Linear:
    columns = linear.weight.shape[1]
    if columns % GROUP_SIZE:
        raise NotSupportedError(f"{where} has {columns} columns; int8 weights take multiples of {GROUP_SIZE}")
    return in_int8(linear)
