"""A step of few tokens: one call of the native kernels for all layers.

Weights are streamed once for all tokens, and activations are float32. The kernels get addresses, so what they point to
is kept here.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.autograd.graph import increment_version

from kvcache import native
from kvcache.decoder.description import DecoderDescription, DecoderLayer, Embedding, Linear, Norm
from kvcache.decoder.rotary import RotaryTables
from kvcache.storage.pool import BlockPool
from kvcache.storage.specs import LayerSpec
from kvcache.storage.step import KindRows, Step

BEST = -1  # of native.kernels.INSTRUCTION_SETS


class FewRows:
    """Runs steps of a described decoder through the kernels, which must be there.

    Args:
        decoder: on the CPU; the channels of its tensors stand side by side.
        tables: of its positions.
        instruction_set: of the kernels; default: the best.
    """

    def __init__(self, decoder: DecoderDescription, tables: RotaryTables, instruction_set: int = BEST) -> None:
        self._decoder = decoder
        self._tables = tables
        self._instruction_set = instruction_set
        self._rotary = list(decoder.rotary)
        self._kinds = list(dict.fromkeys(layer.spec.kind for layer in decoder.layers))
        self._plans = list(dict.fromkeys(map(_plan, decoder.layers)))
        layers = [self._layer_of(layer) for layer in decoder.layers]
        self._native = _kernels().make_decoder(
            decoder.hidden_size,
            _embedding(decoder.embedding),
            layers,
            _norm(decoder.norm),
            _matrix(decoder.head),
            decoder.head_softcap or 0.0,
        )
        self._blocks: WeakKeyDictionary[BlockPool, Any] = WeakKeyDictionary()

    def run(self, step: Step, places: torch.Tensor | None = None) -> torch.Tensor:
        """Store a step's rows in all layers, and return the logits (R, vocabulary) of the tokens at `places`, float32.

        Default: each sequence's last token.
        """
        self._decoder.check_ids(step.largest_id)
        tables = self._tables.upto(step.longest)
        rows = step.take_over()
        wanted = [first - 1 for first in rows.firsts[1:]] if places is None else places.tolist()
        logits = torch.empty(len(wanted), self._decoder.head.weight.shape[0], dtype=torch.float32, device="cpu")
        pool = step.pool
        if (blocks := self._blocks.get(pool)) is None:
            blocks = self._blocks[pool] = _kernels().make_blocks([_blocks_of(store) for store in pool.stores])
        self._native.run(
            self._instruction_set,
            rows.ids,
            rows.positions,
            rows.firsts,
            [_kind(rows.kinds[kind]) for kind in self._kinds],
            blocks,
            [(tables[name].cos.data_ptr(), tables[name].sin.data_ptr()) for name in self._rotary],
            wanted,
            logits.data_ptr(),
            torch.get_num_threads(),
        )
        increment_version([tensor for store in pool.stores for tensor in (store.k, store.v)])
        return logits

    def _layer_of(self, layer: DecoderLayer) -> dict[str, Any]:
        k_dim, v_dim = layer.spec.head_dims
        norms = ("input_norm", "query_norm", "key_norm", "attended_norm", "mlp_norm", "computed_norm")
        return {
            **{name: _norm(getattr(layer, name)) for name in norms},
            **{name: _matrix(linear) for name, linear in layer.linears.items()},
            "num_heads": layer.num_heads,
            "num_kv_heads": layer.spec.num_heads,
            "head_dim": k_dim,
            "v_head_dim": v_dim,
            "scale": layer.scale,
            "softcap": layer.softcap or 0.0,
            "activation": _kernels().ACTIVATIONS[layer.activation],
            "kind": self._kinds.index(layer.spec.kind),
            "plan": self._plans.index(_plan(layer)),
            "rotary": self._rotary.index(layer.rotary),
        }


def _plan(layer: DecoderLayer) -> tuple[int, LayerSpec]:
    return layer.num_heads, layer.spec


def _kernels() -> Any:
    return native.kernels


def _numbers(tensor: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if tensor is None else (tensor.data_ptr(), native.FORMATS[tensor.dtype])


def _norm(norm: Norm | None) -> tuple[Any, ...] | None:
    return None if norm is None else (*_numbers(norm.weight), norm.eps, norm.offset)


def _matrix(linear: Linear) -> tuple[int, ...]:
    weight, scales = linear.weight, linear.scales
    kind = native.FORMATS["int8" if scales is not None else weight.dtype]
    stride = weight.stride(0) * weight.element_size()
    scales_at = 0 if scales is None else scales.data_ptr()
    return weight.data_ptr(), kind, *weight.shape, stride, scales_at, *_numbers(linear.bias)


def _embedding(embedding: Embedding) -> tuple[Any, ...]:
    return *_numbers(embedding.weight), embedding.weight.stride(0) * embedding.weight.element_size(), embedding.scale


def _kind(rows: KindRows) -> tuple[Any, ...]:
    return rows.blocks, rows.rows, rows.tables, rows.lengths, rows.window or 0, rows.sinks


def _blocks_of(store: Any) -> tuple[Any, ...]:
    k_format, v_format = store.formats
    k_dim, v_dim = store.layer.head_dims
    return (
        (store.k.data_ptr(), k_format, k_dim, store.k.shape[3], store.k.stride()),
        (store.v.data_ptr(), v_format, v_dim, store.v.shape[3], store.v.stride()),
        store.block_size,
        store.num_blocks,
    )
