"""Catches what would silently give wrong text, and what a cache alone cannot see.

A guarded model has a hook before and one after its forward and, on the instance, a `prepare_inputs_for_generation` of
its own. They act only on calls with a cache that holds a `Guard`, and go with the last cache that holds this model's.
"""

import inspect
import weakref
from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any, NoReturn, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from kvcache.errors import InvalidTypeError, InvalidValueError
from kvcache.hf.versions import CACHE_ARGUMENT, CACHE_ARGUMENTS
from kvcache.storage.model_config import decoder_config

METHOD = "prepare_inputs_for_generation"


def check_model(model: Any) -> PreTrainedModel:
    """Return `model` if it is a transformers model that can generate, else raise `InvalidTypeError`."""
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise InvalidTypeError(
            f"model is a {type(model).__name__}; expected a transformers model that can generate, for instance from "
            "AutoModelForCausalLM.from_pretrained"
        )
    return model


def check_decoder_only(model: Any) -> PreTrainedModel:
    """Return `model` if `check_model` does and it has no encoder, else raise `InvalidTypeError`."""
    if check_model(model).config.is_encoder_decoder:
        raise InvalidTypeError(f"model is a {type(model).__name__}, an encoder-decoder; expected a decoder only")
    return model  # type: ignore[no-any-return]


class Guard:
    """What the caches of one model hold in common; the model is guarded as long as it lives.

    A guard without a model belongs to caches that were loaded and are attached to none yet.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._model = None if model is None else weakref.ref(model)
        self._decoder = None if model is None else decoder_config(model.config)

    @property
    def attention(self) -> str | None:
        """The name of the attention that the model's decoder uses at the moment."""
        if self._decoder is None:
            return None
        # Past the lookups of configurations, which would be a tenth of what a layer adds to a token.
        name: str | None = object.__getattribute__(self._decoder, "_attn_implementation_internal")
        return name

    def check_attached(self) -> None:
        """Raise `InvalidValueError` if there never was a model."""
        if self._model is None:
            raise InvalidValueError("a loaded cache belongs to no model yet; call cache.attach(model) first")

    def protects(self, model: nn.Module) -> bool:
        """Whether this is the guard of `model`."""
        return self._model is not None and self._model() is model

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # a copied cache is one more cache of the same model

    def __reduce__(self) -> tuple[Any, ...]:
        return Guard, ()


def guard_model(model: nn.Module) -> Guard:
    """Return the guard of `model`, for its caches to hold."""
    present = model.__dict__.get(METHOD)
    guard = present.guard() if isinstance(present, _PrepareInputs) else None
    if guard is None:
        guard = Guard(model)
        hooks = (
            model.register_forward_pre_hook(check_forward, with_kwargs=True),
            model.register_forward_hook(finish_forward, with_kwargs=True),
        )
        model.__dict__[METHOD] = _PrepareInputs(model, present, guard)
        weakref.finalize(guard, _remove, weakref.ref(model), hooks).atexit = False
    return guard


def _remove(model_ref: "weakref.ref[nn.Module]", hooks: tuple[Any, ...]) -> None:
    for hook in hooks:
        hook.remove()
    model = model_ref()
    if model is None or not isinstance(present := model.__dict__.get(METHOD), _PrepareInputs):
        return
    if present.own is None:
        del model.__dict__[METHOD]
    else:
        model.__dict__[METHOD] = present.own


class _PrepareInputs:
    """Called in place of the model's `prepare_inputs_for_generation`, which it calls with checked arguments."""

    def __init__(self, model: nn.Module, own: Callable[..., Any] | None, guard: Guard) -> None:
        self.own = own  # what the instance had before
        self.guard = weakref.ref(guard)
        self._model = weakref.ref(model)  # no cycle, so that a model is freed as soon as it is let go

    @property
    def previous(self) -> Callable[..., Any]:
        model = self._model()
        return self.own or MethodType(getattr(type(model), METHOD), model)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.previous)  # generate reads from it which arguments the model takes

    def __call__(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = _guarded_cache(kwargs)
        if cache is None:
            return self.previous(input_ids, *args, **kwargs)
        _check_belongs(cache, self._model())
        cache.drop_unfinished()
        if kwargs.get("use_cache") is False:
            raise InvalidValueError(
                "use_cache is False, so that generate would run the whole text again at every step, on top of what the "
                "cache holds; pass use_cache=True (the model's generation_config may say otherwise)"
            )
        if kwargs.get("is_first_iteration") and cache.get_seq_length() > 0:
            model: Any = self._model()
            if model.config.is_encoder_decoder:
                raise InvalidValueError(
                    f"the cache holds {cache.get_seq_length()} tokens and belongs to the encoder's last input; "
                    "reset() it before another generate"
                )
            embeds, positions = kwargs.get("inputs_embeds"), kwargs.get("position_ids")
            kwargs["next_sequence_length"] = _prefill_length(
                cache, input_ids if embeds is None else embeds, positions, kwargs.get("next_sequence_length")
            )
        return self.previous(input_ids, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unguarded, (self.previous,)  # a copy of the model has no caches yet


def _unguarded(previous: Callable[..., Any]) -> Callable[..., Any]:
    return previous


def check_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check the inputs of a forward against the cache that comes with them (a pre-hook, with keyword arguments).

    Raises:
        InvalidValueError: the cache was made for another model; a forward was interrupted and a window cannot go
            back to where it began; there are no tokens; or a 2-D attention mask does not cover the cached and the
            new ones.
    """
    kwargs = _by_name(model, args, kwargs)
    cache = _guarded_cache(kwargs)
    if cache is None:
        return
    config: Any = model.config
    prefix = "decoder_" if config.is_encoder_decoder else ""
    input_ids, mask = kwargs.get(f"{prefix}input_ids"), kwargs.get(f"{prefix}attention_mask")
    new = input_ids if input_ids is not None else kwargs.get(f"{prefix}inputs_embeds")
    if new is None:
        return
    _check_belongs(cache, model)
    if new.shape[1] == 0:
        raise InvalidValueError("the input has no tokens; expected at least one")
    cache.drop_unfinished()
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:
        _check_covered(f"{prefix}attention_mask", mask.shape[1], cache.get_seq_length(), new.shape[1])
    cache.note_tokens(input_ids)
    cache.begin()


def finish_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Note that a forward came to its end (a hook)."""
    cache = _guarded_cache(_by_name(model, args, kwargs))
    if cache is not None:
        cache.finish()


def _by_name(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    if not args:
        return kwargs
    return kwargs | dict(zip(parameters_of_forward(type(model).forward), args, strict=False))


@cache
def parameters_of_forward(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a forward's parameters, without self."""
    return tuple(inspect.signature(forward).parameters)[1:]


def _check_belongs(cache: Any, model: Any) -> None:
    cache.guard.check_attached()
    if not cache.guard.protects(model):
        raise InvalidValueError("the cache was made for another model; make one with cache_for(model) for this one")


def _guarded_cache(arguments: dict[str, Any]) -> Any:
    """Return the cache of the decoder's own tokens among the arguments, if it is one of this package."""
    name = next((name for name in ("cache", "past_key_values") if arguments.get(name) is not None), "")
    cache = getattr(arguments.get(name), "self_attention_cache", arguments.get(name))
    if not isinstance(getattr(cache, "guard", None), Guard):
        return None
    if name not in CACHE_ARGUMENTS:
        raise InvalidValueError(f"the installed transformers ignores {name}; pass the cache as {CACHE_ARGUMENT}")
    return cache


def _prefill_length(
    cache: Any, given: torch.Tensor, positions: torch.Tensor | None, new_length: int | None
) -> int | None:
    """Return how many of the `given` tokens (ids or embeddings) are new, None for all of them.

    `generate` says with `new_length` that it was given the whole text, the cached tokens included. Assisted decoding
    would run the whole text again; that shows in positions that start at 0.
    """
    past, length = cache.get_seq_length(), given.shape[1]
    if new_length is not None:
        new_length = length - past  # generate's own count may be of a forward that was interrupted
    runs_all_again = False
    if new_length is None and positions is not None:
        if positions.shape[-1] != length:
            _check_covered("attention_mask or position_ids", positions.shape[-1], past, length)
        elif not positions[..., 0].any():
            runs_all_again = True
            new_length = length - past
    if new_length is None:
        return None
    if new_length < 0:
        _refuse(cache, f"the prompt has {length}", length)
    known = cache.known_tokens()
    comparable = known is not None and given.ndim == 2 and given.shape[0] == known.shape[0]
    if known is not None and comparable and not torch.equal(known, given[:, :past].to(known.device)):
        _refuse(cache, "the prompt begins with other ones", length)
    if new_length == 0 or runs_all_again:
        cache.crop(-1)  # the logits of the prompt's last token are needed, so it has to run again
        new_length += 1
    return new_length


def _check_covered(name: str, covered: int, past: int, new: int) -> None:
    if covered != past + new:
        raise InvalidValueError(
            f"{name} covers {covered} tokens; expected {past + new}: {past} in the cache and {new} new ones"
        )


def _refuse(cache: Any, problem: str, length: int) -> NoReturn:
    past = cache.get_seq_length()
    raise InvalidValueError(
        f"the cache holds {past} tokens, but {problem}; for another text, reset() the cache or crop() it to the common "
        "beginning; to continue the text, give all of it, or only the tokens that are not cached (the last one "
        f"generated is not) with an attention_mask of {past} + their number"
    )
