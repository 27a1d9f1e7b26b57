"""From a model's configuration to its sizes, without its weights."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from kvcache.errors import ModelError
from kvcache.hf.source import loading
from kvcache.plan import ModelSizes
from kvcache.storage import CacheSpec
from kvcache.storage.model_config import decoder_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_k")


def model_sizes(config: "PreTrainedConfig") -> ModelSizes:
    """Return the sizes of the model that this configuration makes: built without memory, and counted.

    Raises:
        InvalidValueError: a layer is neither full nor sliding, as `CacheSpec.from_config` says.
        ModelError: transformers cannot build the model, or what of it are experts, and to how many a token is
            sent, is not told.
    """
    from transformers import AutoModelForCausalLM

    cache = CacheSpec.from_config(config)
    auto_model: Any = AutoModelForCausalLM
    with loading("the model's configuration makes no model"), torch.device("meta"):
        model = auto_model.from_config(config)
    head = model.get_output_embeddings()
    modules = [model.get_decoder(), *([] if head is None else [head])]
    read = {id(weight): weight.numel() for module in modules for weight in module.parameters()}
    heads_weights = set() if head is None else {id(weight) for weight in head.parameters()}
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding) and id(module.weight) not in heads_weights:
            read.pop(id(module.weight), None)
    expert_ids = {id(weight) for name, weight in model.named_parameters() if "experts" in name.split(".")}
    expert_parameters = sum(numel for key, numel in read.items() if key in expert_ids)
    decoder = decoder_config(config)
    num_experts, experts_per_token = 1, 1
    if expert_parameters:
        num_experts, experts_per_token = _told(decoder, _EXPERT_COUNTS), _told(decoder, _EXPERTS_PER_TOKEN)
    elif any((getattr(decoder, name, None) or 0) > 1 for name in _EXPERT_COUNTS):
        raise ModelError(f"{type(decoder).__name__} has experts that cannot be told from its other weights")
    return ModelSizes(
        cache=cache,
        query_heads=tuple(layer.num_attention_heads for layer in decoder.per_layer_config),
        num_parameters=sum(weight.numel() for weight in model.parameters()),
        num_step_parameters=sum(read.values()) - expert_parameters,
        num_expert_parameters=expert_parameters,
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        max_positions=getattr(decoder, "max_position_embeddings", None),
    )


def _told(decoder: Any, names: Iterable[str]) -> int:
    for name in names:
        size = getattr(decoder, name, None)
        if isinstance(size, int) and size >= 1:
            return size
    raise ModelError(f"{type(decoder).__name__} has experts and none of {', '.join(names)}; expected one of them")
