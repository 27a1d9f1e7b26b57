"""Attention in parts through PyTorch's SDPA gives what one query at a time gives."""

import math
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcache import InvalidValueError, attend
from kvcache.attention import parts, sdpa
from kvcache.attention.arguments import check_arguments
from kvcache.attention.sdpa import sdpa_applies, sdpa_attention
from kvcache.storage.codecs import CODECS
from tests.allocations import CountAllocations
from tests.attention.random_inputs import NAN, random_qkv
from tests.oracle import assert_close, attend_rows, visible_positions

DEFAULTS = {
    "block_table": None,
    "lengths": None,
    "starts": None,
    "window": None,
    "sinks": 0,
    "scale": None,
    "softcap": None,
    "sink_logits": None,
    "return_lse": True,
}


def in_parts(q, k, v, **options):
    """Return what `sdpa_attention` gives for `attend`'s arguments."""
    arguments = check_arguments(q, k, v, **{**DEFAULTS, **options})
    assert sdpa_applies(arguments)
    return sdpa_attention(arguments)


def assert_lse_close(actual, expected):
    seen = expected > -math.inf
    assert ((actual > -math.inf) == seen).all()
    tolerance = 1e-12 if actual.dtype == torch.float64 else 1e-5
    assert torch.allclose(actual[seen].double(), expected[seen], rtol=tolerance, atol=tolerance)


def unseen_slots(batch, queries, slots, lengths, starts, window, sinks):
    """Return the (B, S) mask of slots that no query sees."""
    unseen = torch.ones(batch, slots, dtype=torch.bool)
    for b in range(batch):
        length = slots if lengths is None else lengths[b]
        for position in range(length - queries, length):
            start = 0 if starts is None else starts[b]
            unseen[b, visible_positions(position, start=start, window=window, sinks=sinks, length=length)] = False
    return unseen


def poison(rows):
    rows.fill_(255 if rows.dtype == torch.uint8 else NAN)


@st.composite
def shapes_and_options(draw):
    kv_heads, group, batch = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    queries = draw(st.integers(0, 12) | st.integers(0, 40))
    block_size, num_blocks = draw(st.integers(1, 5)), draw(st.integers(0, 12))
    slots = block_size * num_blocks
    per_row = st.lists(st.integers(0, slots), min_size=batch, max_size=batch)
    heads = kv_heads * group
    options = {
        "lengths": draw(st.none() | per_row),
        "starts": draw(st.none() | per_row),
        "window": draw(st.none() | st.integers(1, 12)),
        "sinks": draw(st.integers(0, 5)),
        "scale": draw(st.none() | st.floats(-1.0, 2.0)),
        "sink_logits": draw(st.none() | st.lists(st.floats(-3, 3), min_size=heads, max_size=heads)),
    }
    head_dims = draw(st.sampled_from([(8, 8), (16, 16), (3, 5), (5, 3), (1, 1)]))
    return (batch, heads, kv_heads, queries, slots, *head_dims), (block_size, num_blocks), options


@given(drawn=shapes_and_options(), data=st.data())
def test_every_option_equals_the_oracle_in_pieces_of_any_size(drawn, data):
    shapes, (block_size, num_blocks), options = drawn
    batch, _, kv_heads, queries, slots, *head_dims = shapes
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32]))
    storage = data.draw(st.sampled_from([None, None, ("int8", "int8"), ("int4", "int8"), ("bfloat16", "int4")]))
    q, *rows = random_qkv(*shapes, dtype=dtype)
    numbers = rows
    if storage is not None:
        codecs = [CODECS[name] for name in storage]
        rows = [codec.encode(x) for codec, x in zip(codecs, rows, strict=True)]
        numbers = [codec.decode(x, size, torch.float64) for codec, x, size in zip(codecs, rows, head_dims, strict=True)]
    expected, expected_lse = attend_rows(q, *numbers, **options)

    unseen = unseen_slots(batch, queries, slots, *(options[name] for name in ("lengths", "starts", "window", "sinks")))
    kept = [
        x.masked_fill(unseen[:, None, :, None], 255 if x.dtype == torch.uint8 else NAN) for x in rows
    ]  # 255 reads as NaN
    if data.draw(st.booleans()):  # the same rows scattered over blocks; entries that nobody needs hold anything
        table = torch.tensor(data.draw(st.permutations(range(batch * num_blocks))), dtype=torch.int64)
        table = table.view(batch, num_blocks)
        blocks = []
        for x in kept:
            blocks.append(x.new_empty(batch * num_blocks + 1, kv_heads, block_size, x.shape[3]))
            poison(blocks[-1])
            blocks[-1][table] = x.unflatten(2, (num_blocks, block_size)).transpose(1, 2)
        kept = blocks
        unneeded = unseen.view(batch, num_blocks, block_size).all(dim=2)
        options["block_table"] = table.masked_fill(unneeded, data.draw(st.sampled_from([-1, 10**6])))
    if storage is not None:
        kept = [codec.readable(x, size) for codec, x, size in zip(codecs, kept, head_dims, strict=True)]
    if options["sink_logits"] is not None:
        options["sink_logits"] = torch.tensor(options["sink_logits"], dtype=dtype)

    with patch.object(parts, "PIECE", data.draw(st.sampled_from([1, 2, 3, 5, 8, 256]))):
        output, lse = in_parts(q, *kept, **options)
    assert output.dtype == lse.dtype == dtype
    assert_close(output, expected)
    assert_lse_close(lse, expected_lse)


@pytest.mark.parametrize("amx", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("queries", [1, 8, 9, 40])
@pytest.mark.parametrize("options", [{}, {"window": 9, "sinks": 2}, {"lengths": [60, 13], "starts": [3, 2]}], ids=str)
def test_16_bit_input_is_right_in_both_arithmetics(amx, dtype, queries, options):
    q, k, v = random_qkv(queries=queries, slots=60, dtype=dtype)
    expected, expected_lse = attend_rows(q, k, v, **options)
    with patch.object(sdpa, "has_amx", lambda: amx), patch.object(parts, "PIECE", 16):
        output, lse = in_parts(q, k, v, **options)
    assert output.dtype == dtype
    assert lse.dtype == torch.float32
    assert_close(output, expected)
    seen = expected_lse > -math.inf
    assert (lse[seen] - expected_lse[seen]).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("dtype", "queries", "amx", "expected"),
    [
        (torch.bfloat16, 8, False, torch.bfloat16),  # a whole store is not converted for a few queries
        (torch.bfloat16, 9, False, torch.float32),
        (torch.bfloat16, 9, True, torch.bfloat16),
        (torch.float16, 8, True, torch.float16),
        (torch.float16, 9, True, torch.float32),
        (torch.float32, 9, True, torch.float32),
        (torch.float64, 9, True, torch.float64),
    ],
)
def test_many_16_bit_queries_are_computed_in_float32_but_where_the_cpu_multiplies_bfloat16(
    dtype, queries, amx, expected
):
    with patch.object(sdpa, "has_amx", lambda: amx):
        assert sdpa._arithmetic_dtype(dtype, queries) == expected


def test_few_16_bit_queries_copy_nothing_of_the_store():
    q, k, v = random_qkv(batch=1, queries=1, slots=4096, dtype=torch.bfloat16)
    with CountAllocations() as count:
        in_parts(q, k, v)
    assert count.allocated < k.nbytes / 8


@pytest.mark.parametrize("queries", [2, 12])
def test_float16_scores_beyond_its_range_stay_finite(queries):  # case B9
    q = torch.full((1, 1, queries, 1), 300.0, dtype=torch.float16)
    k = torch.tensor([300.0, -300.0], dtype=torch.float16).repeat(20).view(1, 1, 40, 1)
    v = torch.arange(40.0).half().view(1, 1, 40, 1)
    for options in ({}, {"window": 5}, {"window": 5, "sinks": 2}):
        assert_close(in_parts(q, k, v, **options)[0], attend_rows(q, k, v, **options)[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("queries", [1, 3, 9])
@pytest.mark.parametrize("layout", ["transposed", "expanded", "one slot expanded", "every second element"])
def test_any_layout_of_the_input_is_right(layout, queries, dtype):  # case B12
    q, k, v = random_qkv(queries=queries, slots=33, head_dim=16, dtype=dtype)
    if layout == "transposed":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    elif layout == "expanded":
        q, k, v = q[:, :1].expand(-1, 4, -1, -1), k[:1, :1].expand(2, 2, -1, -1), v[:, :, :, :1].expand(-1, -1, -1, 16)
    elif layout == "one slot expanded":
        q, k, v = q[:, :, :1].expand(-1, -1, queries, -1), k[:, :, :1].expand(-1, -1, 33, -1), v
    else:
        q, k, v = (torch.stack([x, torch.full_like(x, NAN)], dim=-1).flatten(-2)[..., ::2] for x in (q, k, v))
    for options in ({}, {"window": 7, "sinks": 1}, {"lengths": [33, 20]}):
        assert_close(in_parts(q, k, v, **options)[0], attend_rows(q, k, v, **options)[0])


@pytest.mark.parametrize("scale", [0.0, -0.5, 1e-300])
@pytest.mark.parametrize("queries", [1, 9])
def test_a_scale_that_turns_masked_scores_around_is_right(scale, queries):
    q, k, v = random_qkv(queries=queries)
    expected, expected_lse = attend_rows(q, k, v, scale=scale)
    output, lse = in_parts(q, k, v, scale=scale)
    assert_close(output, expected)
    assert_lse_close(lse, expected_lse)
    differentiable, _ = in_parts(q.requires_grad_(), k, v, scale=scale, return_lse=False)
    assert_close(differentiable.detach(), expected)


def test_blocks_that_are_not_contiguous_are_read():
    q, k, v = random_qkv(batch=1, queries=2, slots=8)
    stores = [torch.full((5, 4, x.shape[1], x.shape[3]), NAN, dtype=x.dtype).transpose(1, 2) for x in (k, v)]
    for store, x in zip(stores, (k, v), strict=True):
        store[[3, 1]] = x[0].unflatten(1, (2, 4)).transpose(0, 1)
    assert_close(in_parts(q, *stores, block_table=[[3, 1]])[0], attend_rows(q, k, v)[0])


@pytest.mark.parametrize("bad", [-1, 7])
@pytest.mark.parametrize("queries", [1, 12])
def test_a_needed_entry_out_of_range_is_named_and_others_are_ignored(bad, queries):  # case B7
    q, k, v = random_qkv(batch=1, queries=queries, slots=28)
    stores = [x[0].unflatten(1, (7, 4)).transpose(0, 1).contiguous() for x in (k, v)]
    options = {"window": 3, "sinks": 2, "starts": [5], "lengths": [27]}
    expected, _ = attend_rows(q, k, v, **options)
    first_seen = 27 - queries - 3 + 1  # in a window
    table = torch.arange(7)
    needed = (table == 1) | (table >= first_seen // 4)
    for entry in range(7):
        broken = torch.where(table == entry, bad, table)[None]
        if needed[entry]:
            with pytest.raises(InvalidValueError, match=rf"block_table holds {bad}; expected a block in \[0, 7\)"):
                in_parts(q, *stores, block_table=broken, **options)
        else:
            assert_close(in_parts(q, *stores, block_table=broken, **options)[0], expected)
    assert not needed.all()


def test_a_windowed_chunk_makes_no_mask_of_its_queries_times_all_slots():
    queries, slots, window = 2048, 8192, 512
    q, k, v = random_qkv(1, 2, 1, queries, slots, 16, dtype=torch.float32)
    with CountAllocations() as count:
        output, _ = in_parts(q, k, v, window=window, sinks=4)
    assert count.allocated < queries * slots / 2  # bytes of everything that is made, the output included
    for t in (0, 300, 2047):
        position = slots - queries + t
        seen = visible_positions(position, window=window, sinks=4)
        expected, _ = attend_rows(q[:, :, t : t + 1], k[:, :, seen], v[:, :, seen])
        assert_close(output[:, :, t : t + 1], expected)


def test_a_chunk_over_a_past_makes_no_mask():
    queries, slots = 512, 8192
    q, k, v = random_qkv(1, 2, 1, queries, slots, 16, dtype=torch.float32)
    with CountAllocations() as count:
        in_parts(q, k, v)
    assert count.allocated < 8 * q.nbytes


@pytest.mark.parametrize("options", [{}, {"lengths": [8, 8], "starts": [1, 1]}])
def test_sequences_of_one_length_are_one_call(options):
    q, k, v = random_qkv(slots=9)
    with patch.object(parts, "_causal", wraps=parts._causal) as calls:
        in_parts(q, k, v, **options)
        assert calls.call_count == 1
        in_parts(q, k, v, lengths=[8, 9])
        assert calls.call_count == 3


def test_gradients_take_another_path_and_the_same_numbers():
    q, k, v = random_qkv(queries=3)
    expected, _ = in_parts(q, k, v)
    output, lse = in_parts(q.requires_grad_(), k, v, return_lse=False)
    assert lse is None
    assert torch.autograd.grad(output.square().sum(), q)[0].abs().max() > 1e-3
    assert_close(output.detach(), expected)
    logits = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    for options in ({"return_lse": True}, {"sink_logits": logits}, {"block_table": [[0], [1]]}):
        arguments = check_arguments(q, k, v, **{**DEFAULTS, "return_lse": False, **options})
        assert not sdpa_applies(arguments)
        with torch.no_grad():
            assert sdpa_applies(arguments)


def test_the_log_sum_exp_is_returned_only_where_it_is_asked_for():
    q, k, v = random_qkv()
    assert in_parts(q, k, v, return_lse=False)[1] is None
    assert not sdpa_applies(check_arguments(q, k, v, **{**DEFAULTS, "softcap": 2.0}))


def test_pytorch_has_the_kernel_with_the_signature_that_is_called():
    assert str(getattr(torch.ops.aten, parts.FLASH).default._schema) == (
        "aten::_scaled_dot_product_flash_attention_for_cpu(Tensor query, Tensor key, Tensor value, "
        "float dropout_p=0., bool is_causal=False, *, Tensor? attn_mask=None, float? scale=None) "
        "-> (Tensor output, Tensor logsumexp)"
    )


def test_without_the_kernel_attention_says_so_and_is_right():
    q, k, v = random_qkv()
    expected, expected_lse = attend_rows(q, k, v)
    parts.has_flash.cache_clear()
    try:
        with patch.object(parts, "FLASH", "_no_such_kernel"):
            with pytest.warns(UserWarning, match="has no _no_such_kernel"):
                assert_close(attend(q, k, v), expected)
            output, lse = attend(q, k, v, return_lse=True)  # the warning comes once
            assert_close(output, expected)
            assert_lse_close(lse, expected_lse)
    finally:
        parts.has_flash.cache_clear()
