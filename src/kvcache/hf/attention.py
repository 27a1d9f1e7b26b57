"""Attention of transformers' models through `kvcache.attend`, straight from where the cache keeps its rows.

While a model's attention is this one, the caches of `cache_for` store new rows and return deferred tensors for all of
them. Where those arrive in attention as they are, nothing stands between the store and attention, and the store is
read; a layer that does something with them gets them decoded instead, from then on at once.
"""

import threading
import weakref
from types import TracebackType
from typing import Any, Self

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvcache.attention import attend
from kvcache.errors import InvalidValueError
from kvcache.hf.deferred import content_of, source_of
from kvcache.hf.guard import check_model
from kvcache.hf.layers import StoredRows
from kvcache.hf.masks import MaskRule, mask_of_rule
from kvcache.hf.step_layers import StepRows
from kvcache.storage.model_config import decoder_config

NAME = "kvcache"
# What attention functions are handed that does not change what is computed.
HARMLESS = {"cache_position", "logits_to_keep", "output_attentions", "position_ids", "tokenizer", "use_cache"}


class _Exchange:
    """The attention that a model had before, while one or more `FusedAttention`s hold this one in its place."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.num_holders = 0
        self._before = [(config, config._attn_implementation_internal) for config in configs_of(model)]
        _set_attention(model)

    def undo(self) -> None:
        """Give the attention back, but where another one has been set since."""
        for config, before in self._before:
            if config._attn_implementation_internal == NAME:
                config._attn_implementation_internal = before


_exchanges: "weakref.WeakKeyDictionary[PreTrainedModel, _Exchange]" = weakref.WeakKeyDictionary()
_exchanging = threading.RLock()  # a stream of a session that is collected meanwhile undoes its own


class FusedAttention:
    """What `use_attention` has changed; as a context manager it takes it back at the end.

    Of several for one model, in whatever order they end, the last one gives the model its attention back.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        with _exchanging:
            exchange = _exchanges.get(model)
            if (
                exchange is None
                or exchange.num_holders == 0
                or decoder_config(model.config)._attn_implementation != NAME
            ):
                exchange = _exchanges[model] = _Exchange(model)
            exchange.num_holders += 1
        self._exchange: _Exchange | None = exchange

    def undo(self) -> None:
        """Let the model have the attention again that it had before, unless others hold this one still."""
        with _exchanging:
            exchange, self._exchange = self._exchange, None
            if exchange is not None:
                exchange.num_holders -= 1
                if exchange.num_holders == 0:
                    exchange.undo()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def use_attention(model: PreTrainedModel) -> FusedAttention:
    """Let a model attend through `kvcache.attend`, which reads the caches of `cache_for(model)` as they are stored.

    Prompts and decode steps, full and sliding layers, left-padded batches, softcaps and sink logits are attended
    straight from the store, quantised rows included. Under other masks, and in layers that do something with the keys
    and values in between, attention is PyTorch's over decoded rows, with a warning. Other caches, and runs without one,
    work too.

    Args:
        model: a transformers model that can generate, whose attention is exchangeable (`attn_implementation`).

    Returns:
        An object whose `undo()` gives the model its attention back; as a context manager it does so at the end.

    Raises:
        InvalidTypeError: `model` is no transformers model that can generate.
        InvalidValueError: its attention is not exchangeable.

    Example::

        kvcache.hf.use_attention(model)
        output = model.generate(**inputs, cache=kvcache.hf.cache_for(model, storage="int8"))
    """
    check_model(model)
    if not attention_is_exchangeable(model):
        raise InvalidValueError(
            f"{type(model).__name__} has attention of its own that cannot be exchanged; use cache_for(model) without "
            "use_attention"
        )
    return FusedAttention(model)


def attention_is_exchangeable(model: PreTrainedModel) -> bool:
    """Whether the model looks up its attention by name."""
    return bool(model._can_set_attn_implementation())


def configs_of(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Return every configuration that may name an attention."""
    found = {id(part.config): part.config for part in model.modules() if isinstance(part, PreTrainedModel)}
    waiting = list(found.values())
    while waiting:
        config = waiting.pop()
        for name in config.sub_configs:
            part = getattr(config, name)
            if part is not None and id(part) not in found:
                found[id(part)] = part
                waiting.append(part)
    return list(found.values())


def _set_attention(model: PreTrainedModel) -> None:
    # transformers finds both by this name; without a mask function of that name it would pass no masks at all.
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask_of_rule)
    decoder = decoder_config(model.config)
    parts = [name for name in model.config.sub_configs if getattr(model.config, name) is decoder]
    model.set_attn_implementation(
        {"": model.config._attn_implementation, **dict.fromkeys(parts, NAME)} if parts else NAME
    )


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,  # (B, H, T, D)
    key: torch.Tensor,  # (B, Hkv, S, D)
    value: torch.Tensor,  # (B, Hkv, S, Dv)
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,  # (H,), sink logits
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return the output (B, T, H, Dv), as transformers' attention functions do.

    Raises:
        InvalidValueError: softcap or sink logits together with an option that is not supported.
        NotSupportedError: in a step of a pool, any such option.
    """
    others = {name for name, option in kwargs.items() if option is not None and option is not False} - HARMLESS
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if (step_rows := source_of(key, StepRows)) is not None:
        asked_for = {"dropout": dropout != 0, "is_causal=False": not causal}
        step_rows.check(value, attention_mask, sliding_window, others | {name for name in asked_for if asked_for[name]})
        output = step_rows.attend(query, scale=scaling, softcap=softcap, sink_logits=s_aux)
        return _as_models_take_it(output), None
    rule = _rule(attention_mask, query.shape[2], key, causal, sliding_window)
    if rule is not None and dropout == 0 and not others:
        rows = _stored_rows(key, value, rule)
        if rows is not None:
            output = rows.attend(query, rule, scale=scaling, softcap=softcap, sink_logits=s_aux)
        else:
            output = attend(
                query,
                content_of(key),
                content_of(value),
                starts=rule.starts_in_keys,
                window=rule.window,
                scale=scaling,
                softcap=softcap,
                sink_logits=s_aux,
            )
        return _as_models_take_it(output), None
    if (rows := source_of(key, StoredRows)) is not None:
        rows.layer.warn_decoded(", ".join(sorted(others)) or ("dropout" if dropout else "this mask"))
    key, value, attention_mask = content_of(key), content_of(value), content_of(attention_mask)
    if softcap is None and s_aux is None:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal=is_causal, **kwargs
        )
        return output, None
    if others or (attention_mask is None and query.shape[2] > 1):
        raise InvalidValueError(
            f"attention with softcap or sink logits is asked for {sorted(others) or 'queries without a mask'} too, "
            "which is not supported; use the model's own attention"
        )
    return _masked_attention(module, query, key, value, attention_mask, dropout, scaling, softcap, s_aux), None


def _as_models_take_it(output: torch.Tensor) -> torch.Tensor:
    # (B, H, T, Dv) -> (B, T, H, Dv); some models call view() on it, as transformers' own attention allows.
    return output.transpose(1, 2).contiguous()


def _rule(
    mask: torch.Tensor | None, num_queries: int, key: torch.Tensor, causal: bool, sliding_window: int | None
) -> MaskRule | None:
    """Return what the queries see if it is a rule, else None."""
    num_keys = key.shape[2]
    if mask is None:
        rows = source_of(key, StoredRows)
        window = None if rows is None else rows.layer.window
        everything = num_queries == 1 or (causal and num_queries == num_keys)
        return MaskRule(window, None, 0, 0, num_keys) if everything else None
    rule = source_of(mask, MaskRule)
    if rule is None or rule.num_keys != num_keys or not (causal or num_queries == 1):
        return None
    return None if sliding_window not in (None, rule.window) else rule


def _stored_rows(key: torch.Tensor, value: torch.Tensor, rule: MaskRule) -> StoredRows | None:
    """Return the rows that keys and values stand for, if they are a layer's and the rule is the layer's."""
    keys, values = source_of(key, StoredRows), source_of(value, StoredRows)
    if keys is None or values is None or (keys.layer is not values.layer) or (keys.part, values.part) != (0, 1):
        return None
    return keys if keys.is_current and rule.window == keys.layer.window else None


def _masked_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,  # (B or 1, H or 1, T, S), True or 0 where a key is seen
    dropout: float,
    scaling: float | None,
    softcap: float | None,
    sink_logits: torch.Tensor | None,
) -> torch.Tensor:
    """Attend as transformers' models do with softcap and sink logits, under any mask."""
    batch, heads, queries, head_dim = query.shape
    grouped = query.reshape(batch, key.shape[1], -1, queries, head_dim)
    scores = (grouped @ key[:, :, None].transpose(3, 4)).flatten(1, 2)
    scores = scores.to(torch.promote_types(query.dtype, torch.float32)) * (
        head_dim**-0.5 if scaling is None else scaling
    )
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    sees_nothing = (scores == -torch.inf).all(dim=-1, keepdim=True)
    if sink_logits is not None:
        sink_column = sink_logits.to(scores.dtype).view(1, heads, 1, 1).expand(batch, -1, queries, 1)
        scores = torch.cat([scores, sink_column], dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[2]].masked_fill(sees_nothing, 0.0).to(value.dtype)
    weights = torch.nn.functional.dropout(weights, dropout, module.training)
    output = weights.view(batch, key.shape[1], -1, queries, key.shape[2]) @ value[:, :, None]
    return _as_models_take_it(output.flatten(1, 2)).to(query.dtype)
