"""From a model's name to its sizes, without its weights: names mean what they mean to `kvcache.hf.load_model`."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvcache.errors import ModelError
from kvcache.hf import models, smollm2
from kvcache.plan import ModelSizes
from kvcache.storage import CacheSpec
from kvcache.storage.model_config import decoder_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_k")


def load_config(name: str, progress: Callable[[str], None]) -> "PreTrainedConfig":
    """Return a model's configuration; of `smollm2` and GGUF files too.

    Raises:
        ModelError: as `kvcache.hf.load_model`.
    """
    from transformers import AutoConfig

    source, where, what = _locate(models._check_name(name), progress)
    with models._errors_in_one_line(what), models._loading, models._quiet():
        config: PreTrainedConfig = AutoConfig.from_pretrained(source, trust_remote_code=False, **where)
        models._check_is_decoder(config, where.get("gguf_file", source))
    return config


def _locate(name: str, progress: Callable[[str], None]) -> tuple[str, dict[str, Any], str]:
    """Return where a configuration is, how it is loaded from there, and what to say when that fails."""
    if name == "smollm2":
        return str(smollm2.prepare(progress)), {"local_files_only": True}, "smollm2 cannot be loaded"
    if not models._looks_like_path(name):
        return name, *_on_the_hub(name, progress)
    path = Path(name).expanduser()
    if not path.exists():
        raise ModelError(f"model path {str(path)!r} does not exist")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"model folder {str(path)!r} has no config.json; expected a model in transformers' format")
        return str(path), {"local_files_only": True}, f"the model in {str(path)!r} cannot be loaded"
    models._check_is_gguf(path)
    where = {"local_files_only": True, "gguf_file": str(path.resolve())}
    return str(path.parent), where, f"the GGUF file {str(path)!r} cannot be loaded"


def _on_the_hub(name: str, progress: Callable[[str], None]) -> tuple[dict[str, Any], str]:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    progress(f"Looking for {name}")
    try:
        is_local = isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError as cause:
        expected = "'smollm2', an existing path or a hub id such as 'org/name'"
        raise ModelError(f"model {name!r} does not exist; expected {expected}") from cause
    unreachable = None if is_local else models._why_unreachable(name)
    if unreachable is not None:
        remedy = "connect once, or pass the path of a local model"
        raise ModelError(
            f"model {name!r} is not in the local hub cache, and the hub cannot be reached: {remedy} "
            f"({models._one_line(unreachable)})"
        ) from unreachable
    return {"local_files_only": is_local}, f"model {name!r} from the hub cannot be loaded"


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
    what = "the model's configuration makes no model"
    with models._errors_in_one_line(what), models._loading, models._quiet(), torch.device("meta"):
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
