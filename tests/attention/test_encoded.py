"""Attention over encoded rows gives what it gives over the numbers that they stand for."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcache import InvalidTypeError, InvalidValueError, attend
from kvcache.storage.codecs import CODECS
from tests.attention.random_inputs import DTYPES, random_qkv
from tests.oracle import assert_close, attend_rows

ENCODED = [("int8", "int8"), ("int4", "int4"), ("int8", "int4"), ("int4", "bfloat16"), ("float32", "int8")]
every_storage = pytest.mark.parametrize("storage", ENCODED, ids="/".join)


def kept(storage, *tensors):
    """Return keys and values as each one's codec keeps them: bytes, or numbers of a dtype."""
    return [CODECS[name].encode(rows) for name, rows in zip(storage, tensors, strict=True)]


def readable(storage, data, head_dims=(40, 40)):
    """Return kept keys and values as `attend` takes them, and the float64 numbers that they stand for."""
    codecs = [CODECS[name] for name in storage]
    stores = [codec.readable(rows, size) for codec, rows, size in zip(codecs, data, head_dims, strict=True)]
    numbers = [
        codec.decode(rows, size, torch.float64) for codec, rows, size in zip(codecs, data, head_dims, strict=True)
    ]
    return stores, numbers


def poison(rows):
    """Fill kept rows with what reads as NaN."""
    rows.fill_(255 if rows.dtype == torch.uint8 else math.nan)


@every_storage
@pytest.mark.parametrize("v_head_dim", [40, 33])  # SDPA, and the reference
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lengths": [4, 9]},
        {"starts": [0, 2]},
        {"lengths": [9, 5], "starts": [3, 0]},
        {"lengths": [2, 0]},
        {"window": 3},
        {"window": 3, "lengths": [9, 7], "starts": [0, 4]},
        {"window": 2, "sinks": 2},
        {"window": 2, "sinks": 1, "lengths": [9, 6], "starts": [1, 0]},
        {"scale": 0.3, "softcap": 2.0},
        {"sink_logits": [0.5, -1.0, 2.0, 0.0], "lengths": [0, 9]},
    ],
    ids=str,
)
def test_every_option_sees_the_decoded_rows(storage, v_head_dim, queries, options):
    q, *rows = random_qkv(queries=queries, head_dim=40, v_head_dim=v_head_dim)
    stores, numbers = readable(storage, kept(storage, *rows), (40, v_head_dim))
    expected, expected_lse = attend_rows(q, *numbers, **options)
    if "sink_logits" in options:
        options = {**options, "sink_logits": torch.tensor(options["sink_logits"], dtype=torch.float64)}
    output, lse = attend(q, *stores, return_lse=True, **options)
    assert lse.dtype == torch.float64
    assert_close(output, expected)
    assert_close(attend(q, *stores, **options), expected)
    assert_close(output, attend(q, *numbers, **options))
    seen = expected_lse > -math.inf
    assert ((lse > -math.inf) == seen).all()
    assert torch.allclose(lse[seen], expected_lse[seen], rtol=1e-12, atol=1e-12)


@every_storage
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [None, [9, 4]])
def test_the_output_has_the_dtype_of_the_queries(storage, dtype, lengths):
    q, *rows = random_qkv(head_dim=40, dtype=dtype)
    stores, numbers = readable(storage, kept(storage, *rows))
    expected, expected_lse = attend_rows(q, *numbers, lengths=lengths)
    output, lse = attend(q, *stores, lengths=lengths, return_lse=True)
    plain = attend(q, *stores, lengths=lengths)
    for result in (output, plain):
        assert result.dtype == dtype
        assert_close(result, expected)
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_close(lse, expected_lse)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attend(q, *stores, lengths=lengths), plain)


@every_storage
@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8])
def test_the_last_block_is_read_up_to_the_length_only(storage, length):  # cases B5, B7
    q, *rows = random_qkv(batch=1, queries=1, slots=8, head_dim=40)
    data = kept(storage, *rows)
    _, numbers = readable(storage, data)
    expected, _ = attend_rows(q, *numbers, lengths=[length])
    blocks = [rows.new_empty(4, rows.shape[1], 4, rows.shape[3]) for rows in data]
    for store, rows in zip(blocks, data, strict=True):
        poison(store)
        for slot in range(length):
            store[3 - slot // 4, :, slot % 4] = rows[0, :, slot]  # the table is [3, 2]
    stores, _ = readable(storage, blocks)
    assert_close(attend(q, *stores, block_table=[[3, 2]], lengths=[length]), expected)


@every_storage
def test_ragged_sequences_share_one_store_of_blocks(storage):  # cases B5, B7
    lengths = [1, 3, 4, 5, 7, 8]
    q, *rows = random_qkv(batch=6, queries=2, slots=8, head_dim=40)
    data = kept(storage, *rows)
    _, numbers = readable(storage, data)
    expected, _ = attend_rows(q, *numbers, lengths=lengths)
    table = torch.full((6, 2), -1)
    blocks = [rows.new_empty(12, rows.shape[1], 4, rows.shape[3]) for rows in data]
    for store in blocks:
        poison(store)
    free = iter([7, 2, 11, 0, 4, 9, 5, 1, 10])
    for b, length in enumerate(lengths):
        for start in range(0, length, 4):
            table[b, start // 4] = block = next(free)
            for store, rows in zip(blocks, data, strict=True):
                store[block, :, : length - start] = rows[b, :, start : min(start + 4, length)]
    stores, _ = readable(storage, blocks)
    assert_close(attend(q, *stores, block_table=table, lengths=lengths), expected)


@every_storage
def test_slots_that_no_query_sees_may_hold_anything(storage):  # case B7
    q, *rows = random_qkv(queries=2, slots=9, head_dim=40)
    data = kept(storage, *rows)
    _, numbers = readable(storage, data)
    options = {"lengths": [7, 9], "starts": [0, 2], "window": 3}
    for rows in data:
        poison(rows[0, :, 7:])  # beyond the length
        poison(rows[1, :, :2])  # left padding
        poison(rows[0, :, 1:3])  # behind the window
    stores, _ = readable(storage, data)
    for sinks in (0, 1):
        assert_close(attend(q, *stores, sinks=sinks, **options), attend_rows(q, *numbers, sinks=sinks, **options)[0])


@every_storage
def test_queries_or_slots_may_be_none(storage):  # case K1
    q, *rows = random_qkv(head_dim=40)
    data = kept(storage, *rows)
    stores, _ = readable(storage, data)
    assert attend(q[:, :, :0], *stores).shape == (2, 4, 0, 40)
    empty, _ = readable(storage, [rows[:, :, :0] for rows in data])
    output, lse = attend(q, *empty, return_lse=True)
    assert (output == 0).all()
    assert (lse == -math.inf).all()
    assert (attend(q, *empty) == 0).all()
    no_blocks, _ = readable(storage, [rows[:0] for rows in data])
    assert (attend(q, *no_blocks, block_table=[[-1], [-1]], lengths=[0, 0]) == 0).all()


@every_storage
@pytest.mark.parametrize("lengths", [None, [9, 9]])
def test_rows_may_be_slices_of_a_buffer(storage, lengths):  # case B12
    q, *rows = random_qkv(head_dim=33)  # an odd number of bytes a row
    data = kept(storage, *rows)
    _, numbers = readable(storage, data, (33, 33))
    buffers = [torch.cat([rows, rows, rows], dim=2) for rows in data]
    for buffer in buffers:
        poison(buffer[:, :, :9])
        poison(buffer[:, :, 18:])
    transposed = [rows.transpose(1, 2).contiguous().transpose(1, 2) for rows in data]
    before = [buffer.clone() for buffer in buffers]
    for sliced in ([buffer[:, :, 9:18] for buffer in buffers], transposed):
        stores, _ = readable(storage, sliced, (33, 33))
        assert_close(attend(q, *stores, lengths=lengths), attend_rows(q, *numbers)[0])
    for buffer, original in zip(buffers, before, strict=True):
        assert torch.equal(buffer.view(torch.uint8), original.view(torch.uint8))


@every_storage
@pytest.mark.parametrize("options", [{}, {"lengths": [9, 4]}, {"softcap": 2.0}], ids=str)
def test_gradients_flow_into_the_queries(storage, options):
    q, *rows = random_qkv(head_dim=40)
    stores, numbers = readable(storage, kept(storage, *rows))
    q.requires_grad_()
    gradient, expected = (
        torch.autograd.grad(output.square().sum(), q)[0]
        for output in (attend(q, *stores, **options), attend_rows(q, *numbers, **options)[0])
    )
    assert gradient.abs().max() > 1e-3
    assert torch.allclose(gradient, expected, rtol=1e-9, atol=1e-12)


@given(data=st.data())
def test_random_options_over_scattered_blocks_equal_the_oracle(data):
    draw = data.draw
    storage = draw(st.tuples(*2 * [st.sampled_from(["int8", "int4", "float32", "bfloat16"])]))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    batch, queries = draw(st.integers(1, 3)), draw(st.integers(0, 4))
    head_dims = draw(st.sampled_from([(1, 1), (3, 5), (33, 33), (64, 64), (40, 65)]))
    block_size, num_blocks = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    slots = block_size * num_blocks
    q, *rows = random_qkv(
        batch, kv_heads * group, kv_heads, queries, slots, *head_dims, dtype=draw(st.sampled_from(DTYPES))
    )
    data = kept(storage, *rows)
    _, numbers = readable(storage, data, head_dims)
    per_row = st.lists(st.integers(0, slots), min_size=batch, max_size=batch)
    options = {
        "lengths": draw(st.none() | per_row),
        "starts": draw(st.none() | per_row),
        "window": draw(st.none() | st.integers(1, 6)),
        "sinks": draw(st.integers(0, 3)),
    }
    expected, _ = attend_rows(q, *numbers, **options)
    if draw(st.booleans()):
        order = draw(st.permutations(range(batch * num_blocks)))
        options["block_table"] = table = torch.tensor(order).view(batch, num_blocks)
        blocks = []
        for rows in data:
            blocks.append(rows.new_empty(batch * num_blocks + 1, kv_heads, block_size, rows.shape[3]))
            poison(blocks[-1])  # one block belongs to nobody
            blocks[-1][table] = rows.unflatten(2, (num_blocks, block_size)).transpose(1, 2)
        data = blocks
    stores, _ = readable(storage, data, head_dims)
    assert_close(attend(q, *stores, **options), expected)


Q, K, V = random_qkv(dtype=torch.float32, head_dim=40)
INT8 = CODECS["int8"]
K8, V8 = (INT8.readable(INT8.encode(rows), 40) for rows in (K, V))


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (
            (Q, K8.with_data(K8.data[0]), V8),
            {},
            InvalidValueError,
            r"k has shape \(2, 9, 40\); expected \(B, Hkv, S, D\)",
        ),
        (
            (Q, K8.with_data(K8.data[:1]), V8),
            {},
            InvalidValueError,
            r"k has shape \(1, 2, 9, 40\); expected .* = \(2, any",
        ),
        (
            (Q[..., :33], K8, V8),
            {},
            InvalidValueError,
            r"k has shape \(2, 2, 9, 40\); expected .* = \(2, any, any, 33\)",
        ),
        ((Q, K8, V8.with_data(V8.data[:, :, :8])), {}, InvalidValueError, r"v has shape \(2, 2, 8, 40\)"),
        ((Q, K8, V8.with_data(V8.data[:, :1])), {}, InvalidValueError, r"v has shape \(2, 1, 9, 40\)"),
        ((Q, K8, V[:, :, :8]), {}, InvalidValueError, "v has shape"),
        ((Q[:, :3], K8, V8), {}, InvalidValueError, "q has 3 heads and k has 2"),
        ((Q, K8.with_data(K8.data.to("meta")), V8), {}, InvalidValueError, "k is on meta; expected cpu"),
        ((Q, K8, V8.with_data(V8.data.to("meta"))), {}, InvalidValueError, "v is on meta; expected cpu"),
        ((Q, K8.data, V8), {}, InvalidValueError, "k has shape"),  # bytes that nobody says how to read
        ((Q, K8.data[..., :40], V8), {}, InvalidTypeError, "k has dtype uint8"),
        ((Q, K, V8.data), {}, InvalidTypeError, "v has dtype uint8"),
        ((K8, K8, V8), {}, InvalidTypeError, "q is a EncodedRows"),
        ((Q, K8, V8), {"lengths": [1, 10]}, InvalidValueError, "lengths holds 10"),
        ((Q, K8, V8), {"block_table": [[0], [2]]}, InvalidValueError, r"block_table holds 2; expected .* \[0, 2\)"),
        ((Q, K8, V8), {"block_table": [[0], [-1]]}, InvalidValueError, "block_table holds -1"),
    ],
)
def test_bad_input_is_named(arguments, options, error, message):
    with pytest.raises(error, match=message):
        attend(*arguments, **options)
