"""A step of many tokens: PyTorch's matrix products, in the dtype that this processor multiplies fastest.

What is added up between layers is float32. Weights of another dtype than that of the products are decoded on the way,
one matrix at a time, into memory that all share.
"""

import torch
from torch.nn import functional

from kvcache.attention.processor import product_dtype
from kvcache.decoder.description import DecoderDescription, DecoderLayer, Linear, Norm
from kvcache.decoder.rotary import RotaryTable, RotaryTables
from kvcache.decoder.weights import WeightMemory
from kvcache.precision import without_autocast
from kvcache.storage.step import Step


class ManyRows:
    """Runs steps of a described decoder through PyTorch.

    Args:
        decoder: on the CPU.
        tables: of its positions.
        dtype: of the matrix products; default: the fastest for these weights.
    """

    def __init__(self, decoder: DecoderDescription, tables: RotaryTables, dtype: torch.dtype | None = None) -> None:
        self._decoder = decoder
        self._tables = tables
        self._dtype = product_dtype(decoder.head.weight.dtype) if dtype is None else dtype

    @property
    def worth_it(self) -> int:
        """Tokens from which on this is faster than `FewRows`, as measured on a processor with AVX-512.

        Fewer where PyTorch multiplies in 16 bits: there it is the faster one as soon as there is enough to multiply.
        """
        return 768 if self._dtype == torch.float32 else 96

    def run(self, step: Step, places: torch.Tensor | None = None) -> torch.Tensor:
        """As `FewRows.run`."""
        with without_autocast(torch.device("cpu")):
            return self._logits(step, places)

    def _logits(self, step: Step, places: torch.Tensor | None) -> torch.Tensor:
        self._decoder.check_ids(step.largest_id)
        memory = WeightMemory(self._dtype)
        x = self._decoder.embedding.of(step.tokens[0]).float()
        tables = self._tables.upto(step.longest)
        positions = step.positions[0]
        turns = {name: (table.cos[positions], table.sin[positions]) for name, table in tables.items()}
        for index, layer in enumerate(self._decoder.layers):
            x = x + self._attended(step, index, layer, x, RotaryTable(*turns[layer.rotary]), memory)
            x = x + self._computed(layer, x, memory)
        x = x[step.last if places is None else places]
        logits = self._linear(self._decoder.head, _normalised(self._decoder.norm, x), memory).float()
        cap = self._decoder.head_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _attended(
        self, step: Step, index: int, layer: DecoderLayer, x: torch.Tensor, turn: RotaryTable, memory: WeightMemory
    ) -> torch.Tensor:
        h = _normalised(layer.input_norm, x)
        q, k, v = (
            self._linear(linear, h, memory).view(1, len(h), heads, -1).transpose(1, 2)  # (1, heads, N, D)
            for linear, heads in (
                (layer.query, layer.num_heads),
                (layer.key, layer.spec.num_heads),
                (layer.value, layer.spec.num_heads),
            )
        )
        step.append(index, _rotated(_normalised(layer.key_norm, k), turn), v)
        q = _rotated(_normalised(layer.query_norm, q), turn).to(self._dtype)
        output = step.attend(index, q, scale=layer.scale, softcap=layer.softcap)
        output = self._linear(layer.out, output[0].transpose(0, 1).flatten(1), memory)
        return _normalised(layer.attended_norm, output)

    def _computed(self, layer: DecoderLayer, x: torch.Tensor, memory: WeightMemory) -> torch.Tensor:
        h = _normalised(layer.mlp_norm, x)
        gate = self._linear(layer.gate, h, memory)
        gate = functional.silu(gate) if layer.activation == "silu" else functional.gelu(gate, approximate="tanh")
        product = gate.mul_(self._linear(layer.up, h, memory))
        return _normalised(layer.computed_norm, self._linear(layer.down, product, memory))

    def _linear(self, linear: Linear, x: torch.Tensor, memory: WeightMemory) -> torch.Tensor:
        weight = memory.decoded(linear)
        bias = None if linear.bias is None else linear.bias.to(self._dtype)
        return functional.linear(x.to(self._dtype), weight, bias)


def _normalised(norm: Norm | None, x: torch.Tensor) -> torch.Tensor:
    if norm is None:
        return x
    return functional.rms_norm(x.float(), norm.weight.shape, norm.weight.float() + norm.offset, norm.eps)


def _rotated(heads: torch.Tensor, turn: RotaryTable) -> torch.Tensor:
    """Return heads (1, H, N, D) turned by their positions, float32. Source: RoFormer (arXiv:2104.09864)."""
    a, b = heads.float().chunk(2, dim=-1)
    return torch.cat([a * turn.cos - b * turn.sin, b * turn.cos + a * turn.sin], dim=-1)
