"""What a step of a described decoder must give, written out in float64.

Attention reads the rows that the step has stored, so that what storing them rounds is no difference. That they are the
rows of these tokens is checked layer by layer.
"""

import torch
from torch.nn import functional

from kvcache.decoder import DecoderDescription, DecoderLayer, Linear, Norm
from kvcache.storage import Step
from tests.oracle import attend_rows

GROUP = 32
COMPUTED = 3e-6  # by how much, likewise, computing it in float32 may
# By how much of a row's largest number storing it may change one.
ROUNDING = {"float32": 2**-24, "bfloat16": 2**-8, "float16": 2**-11, "int8": 1 / 127, "int4": 1 / 7}


def weights_of(linear: Linear) -> torch.Tensor:
    """Return the decoded matrix, float64."""
    if linear.scales is None:
        return linear.weight.double()
    rows, columns = linear.weight.shape
    groups = linear.weight.double().reshape(rows, columns // GROUP, GROUP)
    return (groups * linear.scales.double()[:, :, None]).reshape(rows, columns)


def embedded(decoder: DecoderDescription, ids: torch.Tensor) -> torch.Tensor:
    """Return rows of the table times its scale, rounded to the table's dtype as a model rounds them."""
    weight, scale = decoder.embedding.weight, decoder.embedding.scale
    return (weight[ids].double() * scale).to(weight.dtype).double()


def product(linear: Linear, x: torch.Tensor) -> torch.Tensor:
    y = x @ weights_of(linear).T
    return y if linear.bias is None else y + linear.bias.double()


def normed(norm: Norm | None, x: torch.Tensor) -> torch.Tensor:
    if norm is None:
        return x
    return x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * (norm.weight.double() + norm.offset)


def rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Heads (H, N, D)."""
    half = heads.shape[-1] // 2
    turned = torch.cat([-heads[..., half:], heads[..., :half]], dim=-1)
    return heads * cos + turned * sin


def capped(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def expected_logits(
    decoder: DecoderDescription, step: Step, places: torch.Tensor | None = None, tolerance: float = COMPUTED
) -> torch.Tensor:
    """Return the logits (R, vocabulary) of an open step that was run, float64, and check what it has stored.

    `tolerance` is what computing stored rows may change, of their largest number.
    """
    x = embedded(decoder, step.tokens[0])
    for index, layer in enumerate(decoder.layers):
        x = x + normed(layer.attended_norm, product(layer.out, _attended(decoder, step, index, layer, x, tolerance)))
        h = normed(layer.mlp_norm, x)
        gate = product(layer.gate, h)
        gate = gate * torch.sigmoid(gate) if layer.activation == "silu" else functional.gelu(gate, approximate="tanh")
        x = x + normed(layer.computed_norm, product(layer.down, gate * product(layer.up, h)))
    x = x[step.last if places is None else places]
    return capped(product(decoder.head, normed(decoder.norm, x)), decoder.head_softcap)


def _attended(
    decoder: DecoderDescription, step: Step, index: int, layer: DecoderLayer, x: torch.Tensor, tolerance: float
) -> torch.Tensor:
    h = normed(layer.input_norm, x)
    q, k, v = (
        product(linear, h).unflatten(1, (heads, -1)).transpose(0, 1)
        for linear, heads in (
            (layer.query, layer.num_heads),
            (layer.key, layer.spec.num_heads),
            (layer.value, layer.spec.num_heads),
        )
    )
    cos, sin = (turn.double() for turn in decoder.rotary[layer.rotary](step.positions[0]))
    q, k = rotated(normed(layer.query_norm, q), cos, sin), rotated(normed(layer.key_norm, k), cos, sin)
    outputs = []
    for member, (first, count) in enumerate(_spans(step)):
        stored_k, stored_v = stored_rows(step, index, member)
        new = slice(first, first + count)
        for stored, computed in ((stored_k, k), (stored_v, v)):
            _check_stored(step, stored[:, -count:], computed[:, new], tolerance)
        rule = {"window": layer.spec.window, "sinks": layer.spec.sinks}
        output, _ = attend_rows(
            q[None, :, new], stored_k[None], stored_v[None], scale=layer.scale, softcap=layer.softcap, **rule
        )
        outputs.append(output[0].transpose(0, 1).flatten(1))
    return torch.cat(outputs)


def _spans(step: Step) -> list[tuple[int, int]]:
    last = step.last.tolist()
    return [(end + 1 - count, count) for end, count in zip(last, step.num_tokens, strict=True)]


def stored_rows(step: Step, index: int, member: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys (Hkv, n, D) and values (Hkv, n, Dv) of one sequence, decoded, as its table names them."""
    pool = step.pool
    sequence = step.sequences[member]
    table = sequence.table(pool.spec.layers[index].kind)
    length = table.slot(sequence.seq_len + step.num_tokens[member])
    blocks = table.blocks[: -(-length // pool.block_size)].tolist()
    found = []
    for store in pool.stores[index].all_blocks:
        rows = store if isinstance(store, torch.Tensor) else store.decode(torch.float32)
        found.append(rows[blocks].double().transpose(0, 1).flatten(1, 2)[:, :length])
    return found[0], found[1]


def _check_stored(step: Step, stored: torch.Tensor, computed: torch.Tensor, tolerance: float) -> None:
    largest = computed.abs().amax(-1, keepdim=True)
    change = 1.1 * ROUNDING[step.pool.storage] + tolerance
    assert ((stored - computed).abs() <= change * largest + 1e-6).all()
