"""A forward of a transformers decoder over a step of a `BlockPool`: texts of any lengths, side by side, unpadded.

The model is given one row of N tokens, in which positions start anew with each sequence. Everything in it works on
tokens one by one, but for attention and the cache, and these two the step answers.
"""

import weakref
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from kvcache.checks import check_int_tensor, check_range
from kvcache.errors import InvalidTypeError, InvalidValueError, NotSupportedError
from kvcache.hf.attention import use_attention
from kvcache.hf.cache import unchanged_positions
from kvcache.hf.guard import check_decoder_only, parameters_of_forward
from kvcache.hf.step_layers import StepLayer, mask_of_step
from kvcache.hf.versions import CACHE_ARGUMENT
from kvcache.prefix.plain import config_text
from kvcache.storage.model_config import decoder_config
from kvcache.storage.specs import CacheSpec
from kvcache.storage.step import Step

# The specs found to be their models', with the configurations that told, as reading those takes longer than a layer of
# a small model.
_fitting: "weakref.WeakKeyDictionary[PreTrainedModel, tuple[CacheSpec, str]]" = weakref.WeakKeyDictionary()


def forward_step(model: PreTrainedModel, step: Step, places: torch.Tensor | None = None) -> torch.Tensor:
    """Run a decoder over a step's new tokens and return the logits (R, vocabulary) at some of them.

    It stores the new rows in every layer; to commit the step, or to abort it where this raises, is left to the `with`
    that holds it. Rows are stored detached, so no gradient flows into keys and values. Meanwhile the model's attention
    is that of `use_attention`; where that is held around many steps, each step has less to do.

    Args:
        model: a transformers decoder on the pool's device, whose attention is exchangeable.
        step: open, with no layer appended, of a pool whose spec is `CacheSpec.from_config(model.config)`.
        places: int64 (R,), of the tokens among the step's N whose logits are wanted; default `step.last`, each
            sequence's last one.

    Raises:
        InvalidTypeError: `model` is no transformers decoder, `step` no `Step`, or `places` are no integers.
        InvalidValueError: the model's attention is not exchangeable, a layer keeps something else than keys and values,
            the pool's layers or its device are others than the model's, the step is over, `places` are not one row in
            [0, N) on that device, or positions go beyond those from which on the model's rotary tables depend on the
            length. Nothing has been stored.
        NotSupportedError: the model takes no position_ids, or is not causal: nothing has been stored. Or it makes more
            of its keys, values or mask than handing them to attention, attends with dropout, or with anything else that
            a step does not know: then the step is to be aborted.

    Example::

        pool = kvcache.BlockPool(kvcache.CacheSpec.from_config(model.config), num_blocks=64, block_size=16)
        a, b = pool.new_sequence(), pool.new_sequence()
        with torch.no_grad(), pool.step([a, b], [ids_a, ids_b]) as step:
            logits = kvcache.hf.forward_step(model, step)
    """
    check_decoder_only(model)
    _check_step(step)
    wanted = step.last if places is None else checked_places(places, step)
    with use_attention(model):
        parameters = parameters_of_forward(type(model).forward)
        _check_model_takes_steps(model, parameters)
        _check_fits(model, step)
        options: dict[str, Any] = {CACHE_ARGUMENT: Cache([StepLayer(step, i) for i in range(len(step.pool.stores))])}
        if keeps_last := "logits_to_keep" in parameters:
            options["logits_to_keep"] = wanted
        output = model(
            input_ids=step.tokens,
            attention_mask=mask_of_step(step),
            position_ids=step.positions,
            use_cache=True,
            return_dict=True,
            **options,
        )
    logits: torch.Tensor = output.logits[0]
    return logits if keeps_last else logits[wanted]


def check_step_of(model: PreTrainedModel, step: Step) -> None:
    """Check that a step is open and of a pool whose layers, device and owner are the model's."""
    _check_step(step)
    _check_fits(model, step)


def _check_step(step: Any) -> None:
    if not isinstance(step, Step):
        raise InvalidTypeError(f"step is a {type(step).__name__}; expected a Step, which pool.step(...) returns")
    step.check_open()


def checked_places(places: Any, step: Step) -> torch.Tensor:
    """Return places among a step's tokens as int64 (R,), once they are found to be some."""
    checked = check_int_tensor("places", places, (None,), "(R,)", step.pool.device)
    check_range("places", checked, 0, sum(step.num_tokens) - 1)
    return checked


def _check_model_takes_steps(model: PreTrainedModel, parameters: tuple[str, ...]) -> None:
    name = type(model).__name__
    if "position_ids" not in parameters:
        raise NotSupportedError(f"{name} takes no position_ids, so it cannot be told where sequences begin")
    if not getattr(decoder_config(model.config), "is_causal", True):
        raise NotSupportedError(f"{name} is configured with is_causal=False; a step's tokens see only those before")


def _check_fits(model: PreTrainedModel, step: Step) -> None:
    pool = step.pool
    found = pool.spec, config_text(model.config)
    if _fitting.get(model) != found:
        _check_spec(pool.spec, CacheSpec.from_config(model.config))
        _fitting[model] = found
    owner = getattr(pool.observer, "model", None)
    if owner is not None and owner is not model and all(part is not model for part in owner.modules()):
        raise InvalidValueError(
            "the pool has a PrefixCache of another model, which would find what this one computes; expected that model"
        )
    if pool.device != model.device:
        raise InvalidValueError(f"the pool is on {pool.device}; expected it on the model's device, {model.device}")
    length = step.longest
    unchanged = unchanged_positions(decoder_config(model.config))
    if unchanged is not None and length > unchanged.num_tokens:
        raise InvalidValueError(
            f"a sequence gets {length} tokens, and the model's rotary positions of type {unchanged.rope_type!r} change "
            f"beyond {unchanged.num_tokens}, for all sequences of the step at once; expected at most "
            f"{unchanged.num_tokens} tokens a sequence"
        )


def _check_spec(spec: CacheSpec, expected: CacheSpec) -> None:
    remedy = "make the pool with CacheSpec.from_config(model.config)"
    if len(spec.layers) != len(expected.layers):
        raise InvalidValueError(
            f"the pool has {len(spec.layers)} layers; expected the model's {len(expected.layers)}; {remedy}"
        )
    for index, (layer, wanted) in enumerate(zip(spec.layers, expected.layers, strict=True)):
        if layer != wanted:
            raise InvalidValueError(f"layer {index} of the pool is {layer}; expected the model's {wanted}; {remedy}")
