"""What a pool takes in memory, and that nothing in it ever moves."""

import pytest
import torch

from kvcache import CacheSpec, LayerSpec
from tests.allocations import CountAllocations
from tests.storage.pools import MIXED, STORAGES, append_layers, append_only, filled, held_rows, known_rows, new_pool

every_storage = pytest.mark.parametrize("storage", STORAGES)


def tensors(pool):
    return [data for store in pool.stores for data in (store.k, store.v)]


@every_storage
@pytest.mark.parametrize(
    ("spec", "num_blocks", "block_size"),
    [
        (MIXED, 7, 4),
        (MIXED, {"full": 5, "sliding": 3}, 16),
        (CacheSpec([LayerSpec(1, 1)]), 1, 1),
        (CacheSpec([LayerSpec(3, 65, window=8)]), {"sliding": 2}, 5),
    ],
    ids=["mixed", "a number a kind", "one number", "sliding only"],
)
def test_nbytes_is_what_the_spec_says_and_what_the_tensors_take(spec, num_blocks, block_size, storage):
    pool = new_pool(spec, num_blocks, block_size, storage)
    expected = sum(data.untyped_storage().nbytes() for data in tensors(pool))
    assert pool.nbytes == expected == spec.nbytes(num_blocks, block_size, storage)
    assert all(data.is_contiguous() for data in tensors(pool))


def test_the_bytes_of_a_token_by_hand():
    spec = CacheSpec([LayerSpec(2, 64), LayerSpec(1, 40, v_head_dim=3, window=4)])
    nbytes = {
        "float32": 4 * (2 * (64 + 64) + 40 + 3),
        "bfloat16": 2 * (2 * (64 + 64) + 40 + 3),
        "int8": 2 * 2 * (2 * 4 + 64) + (2 * 4 + 40) + (4 + 3),  # 4 bytes for each group of 32 channels
        "int4": 2 * 2 * (2 * 4 + 32) + (2 * 4 + 20) + (4 + 2),
        "int8/int4": 2 * (2 * 4 + 64) + 2 * (2 * 4 + 32) + (2 * 4 + 40) + (4 + 2),
    }
    for storage, expected in nbytes.items():
        assert new_pool(spec, 6, 4, storage).nbytes == 6 * 4 * expected


@pytest.mark.parametrize(("storage", "share"), [("int8", 0.57), ("int4", 0.32), ("int8/int4", 0.45)])
def test_fewer_bits_take_less_than_bfloat16(storage, share):
    spec = CacheSpec([LayerSpec(3, 64)] * 2)
    assert new_pool(spec, storage=storage).nbytes <= share * new_pool(spec, storage="bfloat16").nbytes


@every_storage
def test_what_is_stored_never_moves(storage):
    pool, first = filled(6, storage=storage)
    addresses = [data.data_ptr() for data in tensors(pool)]
    child, rows = first.fork(), held_rows(first)
    full = pool.stores[0].k[first.blocks()[:1]].clone()
    second = pool.new_sequence()
    for turn in range(20):
        append_only(pool, {first: [100 + turn], second: [200 + turn] * 3})
    assert [data.data_ptr() for data in tensors(pool)] == addresses
    assert torch.equal(pool.stores[0].k[first.blocks()[:1]], full)
    assert held_rows(child) == rows
    assert pool.nbytes == MIXED.nbytes(40, 4, storage)


@every_storage
def test_a_token_costs_the_same_however_many_are_stored(storage):  # case C12
    spec = CacheSpec([LayerSpec(2, 8), LayerSpec(1, 40, v_head_dim=6, window=16, sinks=2)])
    pool = new_pool(spec, {"full": 600, "sliding": 600}, 8, storage)
    costs = []
    text, length = pool.new_sequence(), 0
    for stored in (64, 4096):
        append_only(pool, {text: list(range(length, stored))})
        length = stored + 1
        with pool.step([text], [[stored]]) as step:
            rows = [known_rows(spec, layer, [stored]) for layer in range(2)]
            with CountAllocations() as count:
                for layer in range(2):
                    step.append(layer, *rows[layer])
        costs.append((count.allocated, count.copied))
    assert costs[0] == costs[1]


def test_forks_and_going_back_allocate_no_tensor():
    pool, text = filled(30)
    with CountAllocations() as count:
        child = text.fork()
        child.rollback(1)
        child.truncate(29)
        text.free()
        child.free()
    assert (count.allocated, count.copied) == (0, 0)
    pool.check()


def test_a_copy_of_a_shared_block_is_one_block_in_each_layer_of_its_kind():
    pool, text = filled(6)
    child = text.fork()
    before = [data.clone() for data in tensors(pool)]
    with pool.step([child], [[7]]) as step:
        changed = [
            [block for block in range(40) if not torch.equal(data[block], old[block])]
            for data, old in zip(tensors(pool), before, strict=True)
        ]
        append_layers(step)
    assert changed == [[2]] * 8
    assert text.blocks() == [0, 1]
    assert child.blocks() == [0, 2]
