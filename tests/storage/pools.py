"""Pools whose rows are known: what a layer keeps of a token follows from the token's id.

So what a sequence must hold, and what its queries must see, follows from the ids it was given.
"""

from functools import cache
from itertools import count, islice
from typing import Any

import torch

from kvcache import BlockPool, CacheSpec, LayerSpec, Sequence
from kvcache.storage import Step
from tests.oracle import assert_close, attend_rows, visible_positions

STORAGES = ["float64", "float32", "bfloat16", "float16", "int8", "int4", "int8/int4"]
NUM_IDS = 4096  # the rows of a token are those of its id modulo this

FULL = CacheSpec([LayerSpec(num_heads=2, head_dim=4)])
MEAN = CacheSpec([LayerSpec(1, 1), LayerSpec(1, 1, window=4, sinks=1)])  # for the mean trick
MIXED = CacheSpec(
    [
        LayerSpec(num_heads=2, head_dim=4, v_head_dim=6),
        LayerSpec(num_heads=1, head_dim=6, window=4, sinks=2),
        LayerSpec(num_heads=4, head_dim=33),
        LayerSpec(num_heads=2, head_dim=8, v_head_dim=2, window=4, sinks=2),
    ]
)


@cache
def _table(heads: int, head_dim: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(NUM_IDS, heads, head_dim, generator=generator, dtype=torch.float64)


def row_tables(spec: CacheSpec, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys (NUM_IDS, Hkv, D) and values (NUM_IDS, Hkv, Dv) of every id in one layer, float64."""
    heads, (k_dim, v_dim) = spec.layers[layer].num_heads, spec.layers[layer].head_dims
    return _table(heads, k_dim, 3 * layer), _table(heads, v_dim, 3 * layer + 1)


def known_rows(spec: CacheSpec, layer: int, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys (1, Hkv, n, D) and values (1, Hkv, n, Dv) of these tokens in one layer, float64."""
    index = torch.tensor(ids) % NUM_IDS
    k, v = row_tables(spec, layer)
    return k[index].transpose(0, 1)[None], v[index].transpose(0, 1)[None]


def known_queries(spec: CacheSpec, layer: int, ids: list[int], group: int = 2) -> torch.Tensor:
    """Return the queries (1, H, n, D) of these tokens in one layer, `group` heads for each key/value head."""
    table = _table(group * spec.layers[layer].num_heads, spec.layers[layer].head_dim, 3 * layer + 2)
    return table[torch.tensor(ids) % NUM_IDS].transpose(0, 1)[None]


def new_pool(
    spec: CacheSpec = MIXED, num_blocks: int | dict[str, int] = 40, block_size: int = 4, storage: str = "float64"
) -> BlockPool:
    return BlockPool(spec, num_blocks, block_size, storage)


def filled(*lengths: int, **options: Any) -> tuple[Any, ...]:
    """Return a pool, and sequences in it of these lengths, whose ids count on from 1."""
    pool, ids = new_pool(**options), count(1)
    sequences = [pool.new_sequence() for _ in lengths]
    for sequence, length in zip(sequences, lengths, strict=True):
        append_only(pool, {sequence: list(islice(ids, length))})
    return pool, *sequences


def new_ids(step: Step) -> list[int]:
    """Return the ids of a step's new tokens, one sequence behind the other."""
    return step.tokens[0].tolist()


def append_layers(step: Step, num_layers: int | None = None) -> None:
    """Append what the first layers, or all, keep of the step's tokens."""
    for layer in range(len(step.pool.spec.layers))[:num_layers]:
        step.append(layer, *known_rows(step.pool.spec, layer, new_ids(step)))


def append_only(pool: BlockPool, ids: dict[Sequence, list[int]]) -> None:
    """Run one step that gives each sequence its new ids, without attention."""
    with pool.step(list(ids), list(ids.values())) as step:
        append_layers(step)


def forward(step: Step, dtype: torch.dtype = torch.float64, group: int = 2, **options: Any) -> list[Any]:
    """Append and attend in every layer; return what `attend` returned in each."""
    outputs = []
    for layer in range(len(step.pool.spec.layers)):
        step.append(layer, *known_rows(step.pool.spec, layer, new_ids(step)))
        q = known_queries(step.pool.spec, layer, new_ids(step), group).to(dtype)
        outputs.append(step.attend(layer, q, **options))
    return outputs


def extend(pool: BlockPool, ids: dict[Sequence, list[int]], **options: Any) -> list[Any]:
    """Run one step that gives each sequence its new ids, in every layer, and return the outputs of the layers."""
    with pool.step(list(ids), list(ids.values())) as step:
        return forward(step, **options)


def expected_outputs(
    spec: CacheSpec, layer: int, histories: list[list[int]], counts: list[int], group: int = 2, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output (1, H, N, Dv) and log-sum-exp (1, H, N) of the last `counts` tokens of each history."""
    rule = {"window": spec.layers[layer].window, "sinks": spec.layers[layer].sinks}
    results = [
        attend_rows(
            known_queries(spec, layer, ids, group)[:, :, len(ids) - num_queries :],
            *known_rows(spec, layer, ids),
            **rule,
            **options,
        )
        for ids, num_queries in zip(histories, counts, strict=True)
    ]
    output, lse = (torch.cat(parts, dim=2) for parts in zip(*results, strict=True))
    return output, lse


def check_forward(step: Step, **options: Any) -> None:
    """Append and attend in every layer, and check the outputs against attention over each sequence's own history."""
    counts = step.num_tokens
    new = step.tokens[0].split(counts)
    histories = [sequence.tokens + ids.tolist() for sequence, ids in zip(step.sequences, new, strict=True)]
    outputs = forward(step, return_lse=True, **options)
    if "sink_logits" in options:
        options["sink_logits"] = options["sink_logits"].tolist()
    for layer, (output, lse) in enumerate(outputs):
        expected, expected_lse = expected_outputs(step.pool.spec, layer, histories, counts, **options)
        assert_close(output, expected)
        assert_close(lse, expected_lse)


def check_extend(pool: BlockPool, ids: dict[Sequence, list[int]], **options: Any) -> None:
    """Run one step with `check_forward`, and check what it leaves."""
    histories = [sequence.tokens + new for sequence, new in ids.items()]
    with pool.step(list(ids), list(ids.values())) as step:
        check_forward(step, **options)
    assert [sequence.tokens for sequence in ids] == histories
    pool.check()


def mean_forward(step: Step) -> list[list[list[float]]]:
    """Do the mean trick in every layer of head size 1: K is 0, and V of a sequence's token i is i, counted from 1.

    Return, for each layer and sequence, the means of the token numbers that its new tokens see.
    """
    values = step.positions.double().view(1, 1, -1, 1) + 1
    means = []
    for layer in range(len(step.pool.spec.layers)):
        step.append(layer, torch.zeros_like(values), values)
        output = step.attend(layer, torch.ones_like(values))
        means.append([part.tolist() for part in output.flatten().split(step.num_tokens)])
    return means


def mean_of_seen(position: int, layer: LayerSpec) -> float:
    """Return what the mean trick gives for the query at a position."""
    seen = visible_positions(position, window=layer.window, sinks=layer.sinks)
    return sum(seen) / len(seen) + 1


def poison(pool: BlockPool) -> None:
    """Fill all blocks with what no result may show: NaN, or bytes of 255, whose offsets are NaN."""
    for store in pool.stores:
        for data in (store.k, store.v):
            data.fill_(255 if data.dtype == torch.uint8 else float("nan"))


def held_rows(sequence: Sequence) -> list[bytes]:
    """Return the bytes of the keys and of the values in each layer, read through the sequence's block tables."""
    pool = sequence.pool
    rows = []
    for store in pool.stores:
        blocks = sequence.blocks(store.layer.kind)
        length = len(blocks) * pool.block_size - -sequence.seq_len % pool.block_size
        for data in (store.k, store.v):
            held = data[blocks].transpose(0, 1).flatten(1, 2)[:, :length]
            rows.append(bytes(held.contiguous().view(torch.uint8).flatten().tolist()))
    return rows


def content(pool: BlockPool) -> dict[str, Any]:
    """Return all that a pool without an open step knows and holds, for comparison with `==`."""
    kinds = pool.spec.kinds
    return {
        "free": {kind: list(pool._ledgers[kind]._free) for kind in kinds},
        "holders": {kind: pool._ledgers[kind].holders for kind in kinds},
        "sequences": [
            (sequence.tokens, {kind: sequence.blocks(kind) for kind in kinds}, held_rows(sequence))
            for sequence in pool.sequences
        ],
    }


def whole_content(pool: BlockPool) -> tuple[dict[str, Any], list[bytes]]:
    """Return all that a pool without an open step knows, and every byte of its blocks."""
    data = [data.view(torch.uint8) for store in pool.stores for data in (store.k, store.v)]
    return content(pool), [bytes(rows.flatten().tolist()) for rows in data]


def attend_last(
    q: torch.Tensor,  # (H, T, D)
    k: torch.Tensor,  # (Hkv, n, D)
    v: torch.Tensor,  # (Hkv, n, Dv)
    window: int | None,
    sinks: int,
) -> torch.Tensor:
    """Return the output (H, T, Dv) of the last T of n tokens in float64: `attend_rows` of the oracle without loops."""
    (heads, num_queries, head_dim), length = q.shape, k.shape[1]
    k, v = (rows.repeat_interleave(heads // k.shape[0], dim=0) for rows in (k, v))
    other = torch.arange(length)
    position = torch.arange(length - num_queries, length)[:, None]
    hidden = other > position
    if window is not None:
        hidden |= (position - other >= window) & (other >= sinks)
    scores = (q @ k.transpose(1, 2) / head_dim**0.5).masked_fill(hidden, float("-inf"))
    return scores.softmax(dim=-1) @ v
