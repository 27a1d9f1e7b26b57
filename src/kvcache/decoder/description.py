"""What a decoder like Llama is made of, as plain data.

For each layer, x (N, hidden) being the new tokens' activations:

    q, k, v = query(h), key(h), value(h)   with h = input_norm(x); q, k normalised head by head where there are norms
    q, k    = rotated by their positions
    x      += attended_norm(out(attention(q, k, v)))
    x      += computed_norm(down(activation(gate(h)) * up(h)))   with h = mlp_norm(x)

Norms that are None are not there. The logits are head(norm(x)).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from kvcache.errors import InvalidValueError
from kvcache.native import MAX_HEAD_DIM
from kvcache.storage.codecs import GROUP_SIZE
from kvcache.storage.specs import LayerSpec

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class Norm:
    """Root mean square normalisation: `x / sqrt(mean(x ** 2) + eps) * (weight + offset)`. Source: arXiv:1910.07467.

    Args:
        weight: (size,), a float dtype.
        eps: keeps the root above 0.
        offset: 1 where weights are kept as their difference from 1.
    """

    weight: torch.Tensor
    eps: float
    offset: float = 0.0

    def check(self, name: str, size: int) -> None:
        """Check that it has a weight for each of so many numbers."""
        _check_shape(name, self.weight, size)


@dataclass(frozen=True)
class Linear:
    """`x @ weight.T + bias`.

    Args:
        weight: (out, in), a float dtype; or int8 codes, of which 32 in a row share a scale.
        bias: (out,), a float dtype, or None.
        scales: (out, in / 32) bfloat16, with int8 codes; else None.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scales: torch.Tensor | None = None

    def check(self, name: str, num_out: int, num_in: int) -> None:
        """Check that it makes so many numbers of so many."""
        _check_shape(name, self.weight, num_out, num_in)
        if self.bias is not None:
            _check_shape(f"{name}'s bias", self.bias, num_out)
        if self.scales is not None:
            _check_shape(f"{name}'s scales", self.scales, num_out, num_in // GROUP_SIZE)

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""
        tensors = (self.weight, self.bias, self.scales)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


@dataclass(frozen=True)
class Embedding:
    """What enters the first layer for an id: its row of `weight` (vocabulary, hidden), times `scale`, in its dtype."""

    weight: torch.Tensor
    scale: float = 1.0

    def of(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows (N, hidden) of ids (N,)."""
        rows = torch.nn.functional.embedding(ids, self.weight)
        return rows if self.scale == 1.0 else rows * self.scale


@dataclass(frozen=True)
class DecoderLayer:
    """One layer; see the top of this file.

    Args:
        spec: of its keys and values: how many heads, their sizes, a window.
        num_heads: query heads.
        scale: of the scores.
        softcap: scores become `softcap * tanh(scores / softcap)`; None: not.
        rotary: name of the positions' tables.
        activation: of the gate.
        input_norm, query, key, value, query_norm, key_norm, out, attended_norm: its attention.
        mlp_norm, gate, up, down, computed_norm: what follows.
    """

    spec: LayerSpec
    num_heads: int
    scale: float
    softcap: float | None
    rotary: str
    activation: Activation
    input_norm: Norm
    query: Linear
    key: Linear
    value: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    out: Linear
    attended_norm: Norm | None
    mlp_norm: Norm
    gate: Linear
    up: Linear
    down: Linear
    computed_norm: Norm | None

    def __post_init__(self) -> None:
        heads, kv_heads, (k_dim, v_dim) = self.num_heads, self.spec.num_heads, self.spec.head_dims
        hidden, inner = self.query.weight.shape[-1], len(self.gate.weight)
        expected = {
            "query": (heads * k_dim, hidden),
            "key": (kv_heads * k_dim, hidden),
            "value": (kv_heads * v_dim, hidden),
            "out": (hidden, heads * v_dim),
            "gate": (inner, hidden),
            "up": (inner, hidden),
            "down": (hidden, inner),
        }
        for name, linear in self.linears.items():
            linear.check(name, *expected[name])
        for name, part in vars(self).items():
            if isinstance(part, Norm):
                part.check(name, k_dim if name in ("query_norm", "key_norm") else hidden)
        if heads % kv_heads or k_dim % 2 or not max(k_dim, v_dim) <= MAX_HEAD_DIM:
            raise InvalidValueError(
                f"there are {heads} query heads over {kv_heads} of {k_dim} and {v_dim}; expected a multiple, and even "
                f"head sizes of at most {MAX_HEAD_DIM}"
            )

    @property
    def linears(self) -> dict[str, Linear]:
        """Its matrices by name."""
        return {name: part for name, part in vars(self).items() if isinstance(part, Linear)}


@dataclass(frozen=True)
class DecoderDescription:
    """A whole decoder.

    Args:
        embedding: of ids.
        layers: in order.
        norm, head: of the logits.
        head_softcap: logits become `head_softcap * tanh(logits / head_softcap)`; None: not.
        rotary: by name, what returns cosines and sines (P, D) for positions (P,), both halves of D alike.
        max_positions: for which `rotary` may be asked; None: any.
    """

    embedding: Embedding
    layers: tuple[DecoderLayer, ...]
    norm: Norm
    head: Linear
    head_softcap: float | None
    rotary: Mapping[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]]
    max_positions: int | None = None

    def __post_init__(self) -> None:
        hidden = self.hidden_size
        for index, layer in enumerate(self.layers):
            if (size := layer.query.weight.shape[1]) != hidden:
                raise InvalidValueError(f"layer {index} takes {size} numbers of a token; expected {hidden}")
        self.norm.check("norm", hidden)
        self.head.check("head", len(self.head.weight), hidden)

    def check_ids(self, largest: int) -> None:
        """Check that a step's largest id is one of the vocabulary."""
        if largest >= (vocabulary := len(self.embedding.weight)):
            raise InvalidValueError(f"tokens has the id {largest}; expected ids below the vocabulary's {vocabulary}")

    @property
    def hidden_size(self) -> int:
        """Numbers of a token between layers."""
        return self.embedding.weight.shape[1]

    @property
    def step_nbytes(self) -> int:
        """Bytes of weights that a step reads, however few tokens it has; embeddings are left out."""
        return sum(linear.nbytes for linear in self.linears)

    @property
    def linears(self) -> list[Linear]:
        """All its matrices."""
        return [*(part for layer in self.layers for part in layer.linears.values()), self.head]


def _check_shape(name: str, tensor: torch.Tensor, *sizes: int) -> None:
    if tuple(tensor.shape) != sizes:
        raise InvalidValueError(f"{name} has shape {tuple(tensor.shape)}; expected {sizes}")
