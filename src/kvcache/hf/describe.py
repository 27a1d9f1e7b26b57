"""A transformers model read as a decoder like Llama, if it is one; else what of it is not."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from kvcache.decoder import DecoderDescription, DecoderLayer, Embedding, Linear, Norm
from kvcache.decoder.description import Activation
from kvcache.errors import InvalidValueError, NotSupportedError
from kvcache.hf.cache import unchanged_positions
from kvcache.hf.parts import Parts
from kvcache.storage import CacheSpec
from kvcache.storage.model_config import decoder_config


class Family(NamedTuple):
    """What the classes of one of transformers' modules do, where they differ.

    norm_offset: what norms add to their weights. four_norms: whether what attention and MLP give is normed as well.
    head_norms: whether queries and keys are. softcaps: whether scores and logits have a cap.
    """

    norm_offset: float = 0.0
    four_norms: bool = False
    head_norms: bool = False
    softcaps: bool = False


FAMILIES = {
    "Llama": Family(),
    "Mistral": Family(),
    "Qwen2": Family(),
    "Qwen3": Family(head_norms=True),
    "Gemma": Family(norm_offset=1.0),
    "Gemma2": Family(norm_offset=1.0, four_norms=True, softcaps=True),
    "Gemma3": Family(norm_offset=1.0, four_norms=True, head_norms=True),
}
ACTIVATIONS: dict[str, Activation] = {"SiLUActivation": "silu", "SiLU": "silu", "GELUTanh": "gelu_tanh"}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def describe(model: PreTrainedModel) -> tuple[DecoderDescription, Parts]:
    """Return a model as plain data that shares its weights, and the parts of it that this goes by.

    Raises:
        NotSupportedError: the model is none of the families that are known, or which part of it is otherwise.
    """
    name = type(model).__name__.removesuffix("ForCausalLM")
    family = FAMILIES.get(name)
    if family is None or type(model).__module__ != f"transformers.models.{name.lower()}.modeling_{name.lower()}":
        known = ", ".join(f"{known}ForCausalLM" for known in FAMILIES)
        raise NotSupportedError(f"the model is a {type(model).__name__}; expected one of {known}")
    dropout: float = getattr(model.config, "attention_dropout", 0.0)
    if model.training and dropout:
        raise NotSupportedError("the model is in training mode, with dropout; call model.eval()")
    try:
        spec = CacheSpec.from_config(model.config)
    except InvalidValueError as error:
        raise NotSupportedError(str(error)) from error
    return _Reader(model, name, family, spec).description()


class _Reader:
    def __init__(self, model: PreTrainedModel, name: str, family: Family, spec: CacheSpec) -> None:
        self.parts = Parts(model)
        self.model = model
        self.name = name
        self.family = family
        self.spec = spec
        self.config: Any = decoder_config(model.config)

    def description(self) -> tuple[DecoderDescription, Parts]:
        root = self.parts.module(self.model, "", None)
        base = self._own("model", "Model", "TextModel")
        layers = self.parts.child(base, "model", "layers")
        num_layers = len(self.spec.layers)
        read = tuple(self._layer(layers, index) for index in range(num_layers))
        embedding, rotary = self._embedding(base), self._rotary(base)
        cap = self.config.final_logit_softcapping if self.family.softcaps else None
        unchanged = unchanged_positions(self.config)
        norm, head = self._norm(base, "model", "norm"), self._linear(root, "", "lm_head")
        max_positions = None if unchanged is None else unchanged.num_tokens
        try:
            description = DecoderDescription(embedding, read, norm, head, cap, rotary, max_positions)
        except InvalidValueError as error:
            raise NotSupportedError(str(error)) from error
        self._check_dtypes(description)
        return description, self.parts

    def _embedding(self, base: nn.Module) -> Embedding:
        path = "model.embed_tokens"
        module: Any = self.parts.child(base, "model", "embed_tokens")
        weight = self.parts.tensor(module, path, "weight")
        if type(module) is nn.Embedding and module.max_norm is None:
            return Embedding(weight)
        is_own = type(module).__module__ == type(base).__module__
        if not is_own or type(module).__name__ not in self._classes("TextScaledWordEmbedding"):
            raise NotSupportedError(f"{path} is a {type(module).__name__}; expected a torch.nn.Embedding")
        return Embedding(weight, float(self.parts.tensor(module, path, "embed_scale").to(weight.dtype)))

    def _own(self, path: str, *kinds: str) -> nn.Module:
        """Return a part of the model that must be of a class of its family."""
        return self.parts.own(path, self._classes(*kinds))

    def _classes(self, *kinds: str) -> tuple[str, ...]:
        return tuple(self.name + kind for kind in kinds)

    def _layer(self, layers: nn.Module, index: int) -> DecoderLayer:
        path = f"model.layers.{index}"
        layer = self.parts.child(layers, "model.layers", str(index), self._classes("DecoderLayer"))
        attention: Any = self.parts.child(layer, path, "self_attn", self._classes("Attention"))
        mlp: Any = self.parts.child(layer, path, "mlp", self._classes("MLP"))
        linears = {name: self._linear(attention, f"{path}.self_attn", f"{name}_proj") for name in "qkvo"}
        norms = dict.fromkeys("qk", None) | {
            name: self._norm(attention, f"{path}.self_attn", f"{name}_norm") for name in "qk" if self.family.head_norms
        }
        if getattr(self.config, "attention_dropout", 0.0):
            self.parts.attribute(attention, "training")
        if not getattr(attention, "is_causal", True):
            raise NotSupportedError(f"{path}.self_attn is not causal")
        if attention.layer_idx != index:
            raise NotSupportedError(f"{path}.self_attn has layer_idx {attention.layer_idx}; expected {index}")
        after = "post_attention_layernorm"
        four = self.family.four_norms
        spec = self.spec.layers[index]
        parts: dict[str, Any] = {
            "spec": spec,
            "num_heads": len(linears["q"].weight) // spec.head_dim,
            "scale": float(self.parts.attribute(attention, "scaling")),
            "softcap": attention.attn_logit_softcapping if self.family.softcaps else None,
            "rotary": self._rotary_name(index),
            "activation": self._activation(mlp, path),
            "input_norm": self._norm(layer, path, "input_layernorm"),
            "query": linears["q"],
            "key": linears["k"],
            "value": linears["v"],
            "query_norm": norms["q"],
            "key_norm": norms["k"],
            "out": linears["o"],
            "attended_norm": self._norm(layer, path, after) if four else None,
            "mlp_norm": self._norm(layer, path, "pre_feedforward_layernorm" if four else after),
            "gate": self._linear(mlp, f"{path}.mlp", "gate_proj"),
            "up": self._linear(mlp, f"{path}.mlp", "up_proj"),
            "down": self._linear(mlp, f"{path}.mlp", "down_proj"),
            "computed_norm": self._norm(layer, path, "post_feedforward_layernorm") if four else None,
        }
        try:
            return DecoderLayer(**parts)
        except InvalidValueError as error:
            raise NotSupportedError(f"{path}: {error}") from error

    def _activation(self, mlp: Any, path: str) -> Activation:
        name = type(self.parts.child(mlp, f"{path}.mlp", "act_fn")).__name__
        if name not in ACTIVATIONS:
            raise NotSupportedError(f"{path}.mlp.act_fn is a {name}; expected one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[name]

    def _linear(self, owner: nn.Module, path: str, name: str) -> Linear:
        linear = self.parts.child(owner, path, name)
        where = f"{path}.{name}".lstrip(".")
        if type(linear) is not nn.Linear:
            raise NotSupportedError(f"{where} is a {type(linear).__name__}; expected a torch.nn.Linear")
        weight = self.parts.tensor(linear, where, "weight")
        if linear.bias is not None:
            return Linear(weight, self.parts.tensor(linear, where, "bias"))
        self.parts.no_tensor(linear, "bias")
        return Linear(weight)

    def _norm(self, owner: nn.Module, path: str, name: str) -> Norm:
        norm: Any = self.parts.child(owner, path, name, self._classes("RMSNorm"))
        eps = self.parts.attribute(norm, "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps")
        return Norm(self.parts.tensor(norm, f"{path}.{name}", "weight"), float(eps), self.family.norm_offset)

    def _rotary_name(self, index: int) -> str:
        return self.config.layer_types[index] if self._has_two_rotaries else "all"

    @property
    def _has_two_rotaries(self) -> bool:
        return self.name == "Gemma3"

    def _rotary(self, base: nn.Module) -> dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]]:
        module = self.parts.child(base, "model", "rotary_emb", self._classes("RotaryEmbedding"))
        for name in module._buffers:
            self.parts.tensor(module, "model.rotary_emb", name)
        for name in vars(module):
            if name.endswith("attention_scaling"):
                self.parts.attribute(module, name)
        names = dict.fromkeys(self._rotary_name(index) for index in range(len(self.spec.layers)))
        if self._has_two_rotaries:
            return {name: partial(_turns, module, layer_type=name) for name in names}
        return {name: partial(_turns, module) for name in names}

    def _check_dtypes(self, description: DecoderDescription) -> None:
        dtype = description.embedding.weight.dtype
        for path, tensor in self.parts.tensors.items():
            if path.rpartition(".")[2] not in ("weight", "bias"):  # buffers, which are read once
                continue
            if tensor.device.type != "cpu":
                raise NotSupportedError(f"{path} is on {tensor.device}; expected all weights on the CPU")
            if tensor.dtype not in DTYPES:
                raise NotSupportedError(f"{path} is {tensor.dtype}; expected float32, bfloat16 or float16")
            if tensor.dtype != dtype:
                raise NotSupportedError(
                    f"{path} is {tensor.dtype} and model.embed_tokens.weight {dtype}; expected one dtype"
                )
            if tensor.stride(-1) != 1:
                raise NotSupportedError(f"{path} has strides {tuple(tensor.stride())}; expected rows in one piece")


def _turns(module: Any, positions: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    like = torch.empty(0, dtype=torch.float32, device="cpu")  # what is returned has its dtype
    cos, sin = module(like, positions.unsqueeze(0), **options)
    return cos[0], sin[0]
