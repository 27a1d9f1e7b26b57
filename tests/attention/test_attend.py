import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcache import InvalidTypeError, InvalidValueError, attend
from tests.attention.random_inputs import DTYPES, NAN, random_qkv
from tests.oracle import assert_close, attend_rows, mean_trick


@pytest.mark.parametrize("return_lse", [False, True])  # two kernels: SDPA and the reference
@pytest.mark.parametrize(("queries", "expected"), [(1, [2.5]), (2, [2.0, 2.5]), (4, [1.0, 1.5, 2.0, 2.5])])
def test_last_queries_see_everything_before_them(queries, expected, return_lse):  # case B1
    k, v = mean_trick(4)
    result = attend(torch.ones(1, 1, queries, 1, dtype=torch.float64), k, v, return_lse=return_lse)
    output = result[0] if return_lse else result
    assert_close(output.flatten(), torch.tensor(expected, dtype=torch.float64))


def test_ragged_rows_each_end_at_their_own_length():  # case B1, ragged
    k, v = (x.expand(2, -1, -1, -1) for x in mean_trick(4))
    output = attend(torch.ones(2, 1, 2, 1, dtype=torch.float64), k, v, lengths=[2, 4])
    assert output.flatten().tolist() == pytest.approx([1.0, 1.5, 2.0, 2.5], rel=1e-12)


@pytest.mark.parametrize("chunks", [[7], [3, 4], [3, 1, 1, 1, 1]])
def test_chunks_give_the_rows_of_one_run(chunks):  # case B3
    q, k, v = random_qkv(queries=7, slots=7)
    expected, _ = attend_rows(q, k, v)
    outputs, end = [], 0
    for size in chunks:
        end += size
        outputs.append(attend(q[:, :, end - size : end], k[:, :, :end], v[:, :, :end]))
    assert_close(torch.cat(outputs, dim=2), expected)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8])
def test_last_page_is_read_up_to_the_length_only(length):  # case B5
    q, k, v = random_qkv(batch=1, queries=1, slots=8)
    expected, _ = attend_rows(q, k, v, lengths=[length])
    pages = [torch.full((4, x.shape[1], 4, x.shape[3]), NAN, dtype=x.dtype) for x in (k, v)]
    for store, rows in zip(pages, (k, v), strict=True):
        for slot in range(length):
            store[3 - slot // 4, :, slot % 4] = rows[0, :, slot]  # the table is [3, 2]
    assert_close(attend(q, *pages, block_table=[[3, 2]], lengths=[length]), expected)


@pytest.mark.parametrize("poison", [NAN, float("inf"), -float("inf")])
def test_slots_that_no_query_sees_may_hold_anything(poison):  # case B7
    q, k, v = random_qkv(queries=2, slots=9)
    lengths, starts, window = [7, 9], [0, 2], 3
    expected, _ = attend_rows(q, k, v, lengths=lengths, starts=starts, window=window, sinks=1)
    k[0, :, 7:], v[0, :, 7:] = poison, poison  # beyond the length
    k[1, :, :2], v[1, :, :2] = poison, poison  # left padding
    k[0, :, 1:3], v[0, :, 1:3] = poison, poison  # behind the window, after the sink
    assert_close(attend(q, k, v, lengths=lengths, starts=starts, window=window, sinks=1), expected)


def test_behind_a_window_the_plain_path_reads_nothing():  # case B7 through SDPA
    q, k, v = random_qkv(queries=2, slots=9)
    expected, _ = attend_rows(q, k, v, window=4)
    k[:, :, :4], v[:, :, :4] = NAN, NAN
    assert_close(attend(q, k, v, window=4), expected)


@pytest.mark.parametrize("starts", [None, [0, 1]])
def test_float16_scores_beyond_its_range_stay_finite(starts):  # case B9
    q = torch.full((2, 1, 1, 1), 300.0, dtype=torch.float16)
    k = torch.tensor([300.0, -300.0, 300.0], dtype=torch.float16).view(1, 1, 3, 1).expand(2, -1, -1, -1)
    v = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float16).view(1, 1, 3, 1).expand(2, -1, -1, -1)
    expected, _ = attend_rows(q, k, v, starts=starts)
    assert_close(attend(q, k, v, starts=starts), expected)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (6, 2), (8, 1), (3, 3)])
@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("lengths", [None, [5]])
def test_query_heads_read_the_key_value_head_of_their_group(heads, kv_heads, queries, lengths):  # case B10
    k = torch.zeros(1, kv_heads, 5, 2)
    v = torch.arange(1, kv_heads + 1, dtype=torch.float32).mul(10).view(1, -1, 1, 1).expand(1, kv_heads, 5, 2)
    output = attend(torch.ones(1, heads, queries, 2), k, v, lengths=lengths)
    expected = [10.0 * (1 + head // (heads // kv_heads)) for head in range(heads)]
    for t in range(queries):
        assert output[0, :, t, 0].tolist() == pytest.approx(expected)


def test_four_heads_over_three_are_refused():  # case B10
    q, k, v = random_qkv(heads=4, kv_heads=3)
    with pytest.raises(InvalidValueError, match="q has 4 heads and k has 3"):
        attend(q, k, v)


@pytest.mark.parametrize("slots", [1, 32, 33, 65])
@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["transposed", "expanded", "every second element", "slice of a buffer"])
def test_non_contiguous_inputs_equal_contiguous_ones(layout, dtype, queries, slots):  # case B12
    q, k, v = random_qkv(queries=queries, slots=slots, head_dim=16, dtype=dtype)
    queries = min(queries, slots)
    q = q[:, :, :queries]
    if layout == "transposed":  # the layout that projections give: (B, S, Hkv, D) seen as (B, Hkv, S, D)
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    elif layout == "expanded":
        k, v = (x[:1].expand(2, -1, -1, -1) for x in (k, v))
    elif layout == "every second element":
        q, k, v = (torch.stack([x, torch.full_like(x, NAN)], dim=-1).flatten(-2)[..., ::2] for x in (q, k, v))
    else:
        k, v = (torch.cat([x, torch.full_like(x, NAN)], dim=2)[:, :, :slots] for x in (k, v))
    contiguous = [x.contiguous() for x in (q, k, v)]
    expected, _ = attend_rows(*contiguous)
    assert_close(attend(q, k, v), expected)
    assert_close(attend(q, k, v, lengths=[slots, slots]), expected)
    assert torch.equal(attend(q, k, v), attend(*contiguous))  # to the bit: no kernel that rounds differently


def test_a_table_shorter_than_the_length_is_refused():  # case B14
    q, k, v = random_qkv(batch=1, queries=2)
    with pytest.raises(InvalidValueError, match=r"lengths holds 9; expected every entry in \[0, 8\]"):
        attend(q, k.view(1, 2, 9, 8)[:, :, :8], v[:, :, :8], block_table=[[0]], lengths=[9])


def test_an_unknown_mask_argument_is_an_error():  # case B16
    q, k, v = random_qkv()
    with pytest.raises(TypeError, match="attention_mask"):
        attend(q, k, v, attention_mask=torch.ones(2, 9))


def test_padded_keys_have_weight_zero():  # case B16
    k, v = (x.expand(2, -1, -1, -1) for x in mean_trick(5))
    output = attend(torch.ones(2, 1, 1, 1, dtype=torch.float64), k, v, starts=[2, 0])
    assert output.flatten().tolist() == pytest.approx([4.0, 3.0], rel=1e-12)


def test_window_and_sinks_by_hand():
    k, v = mean_trick(8)
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    assert attend(q, k, v, window=3).item() == pytest.approx(7.0)  # 6, 7, 8
    assert attend(q, k, v, window=3, sinks=2).item() == pytest.approx((1 + 2 + 6 + 7 + 8) / 5)
    assert attend(q, k, v, window=3, sinks=2, starts=[3]).item() == pytest.approx((4 + 5 + 6 + 7 + 8) / 5)
    assert attend(q, k, v, window=1).item() == pytest.approx(8.0)


def test_queries_that_see_nothing_give_zeros():
    q, k, v = random_qkv(batch=1, queries=4, slots=3)
    output, lse = attend(q, k, v, return_lse=True)
    assert (output[:, :, 0] == 0).all()
    assert (lse[:, :, 0] == -math.inf).all()
    assert_close(output[:, :, 1:], attend_rows(q[:, :, 1:], k, v)[0])
    assert (attend(q, k, v, lengths=[0]) == 0).all()
    assert (attend(q, k[:, :, :0], v[:, :, :0]) == 0).all()


@pytest.mark.parametrize(("dtype", "stored"), [*((dtype, dtype) for dtype in DTYPES), (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("poison", [NAN, float("inf")])
def test_rows_and_queries_that_see_nothing_give_zeros_beside_those_that_see(dtype, stored, window, poison):  # case B7
    q, k, v = random_qkv(batch=6, queries=3, slots=9)
    q, k, v = q.to(dtype), k.to(stored), v.to(stored)
    lengths, starts = [9, 2, 0, 5, 7, 6], [0, 0, 0, 4, 7, 8]
    expected, _ = attend_rows(q, k, v, lengths=lengths, starts=starts, window=window)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        for rows in (k, v):
            rows[row, :, :start], rows[row, :, length:] = poison, poison
    output = attend(q, k, v, lengths=lengths, starts=starts, window=window)
    assert output.dtype == dtype
    assert_close(output, expected)
    seeing = [[1, 1, 1], [0, 1, 1], [0, 0, 0], [0, 0, 1], [0, 0, 0], [0, 0, 0]]
    assert (output != 0).any(dim=3).any(dim=1).int().tolist() == seeing


def test_no_queries_give_an_empty_output():  # case K1
    q, k, v = random_qkv(queries=0, v_head_dim=5)
    assert attend(q, k, v).shape == (2, 4, 0, 5)


def test_sink_logits_take_weight_and_give_no_value():
    k, v = mean_trick(3)
    output, lse = attend(torch.ones(1, 1, 1, 1, dtype=torch.float64), k, v, sink_logits=torch.zeros(1), return_lse=True)
    assert output.item() == pytest.approx((1 + 2 + 3) / 4)
    assert lse.item() == pytest.approx(math.log(4))


@given(data=st.data())
def test_every_option_equals_the_oracle(data):
    draw = data.draw
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    batch, queries = draw(st.integers(1, 3)), draw(st.integers(0, 5))
    head_dim, v_head_dim = draw(st.sampled_from([(1, 1), (3, 5), (8, 8)]))
    block_size, num_blocks = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    slots = block_size * num_blocks
    q, k, v = random_qkv(
        batch, kv_heads * group, kv_heads, queries, slots, head_dim, v_head_dim, draw(st.sampled_from(DTYPES))
    )
    per_row = st.lists(st.integers(0, slots), min_size=batch, max_size=batch)
    options = {
        "lengths": draw(st.none() | per_row),
        "starts": draw(st.none() | per_row),
        "window": draw(st.none() | st.integers(1, 6)),
        "sinks": draw(st.integers(0, 3)),
        "scale": draw(st.none() | st.floats(0.1, 2.0)),
        "softcap": draw(st.none() | st.floats(0.5, 30.0)),
        "sink_logits": draw(st.none() | st.lists(st.floats(-3, 3), min_size=q.shape[1], max_size=q.shape[1])),
    }
    expected, expected_lse = attend_rows(q, k, v, **options)
    if options["sink_logits"] is not None:
        options["sink_logits"] = torch.tensor(options["sink_logits"], dtype=torch.float64)
    if draw(st.booleans()):  # the same rows scattered over blocks, with one block that nobody owns
        order = draw(st.permutations(range(batch * num_blocks)))
        table = torch.tensor(order).view(batch, num_blocks)
        blocks = []
        for rows in (k, v):
            store = torch.full((batch * num_blocks + 1, kv_heads, block_size, rows.shape[3]), NAN, dtype=rows.dtype)
            store[table] = rows.unflatten(2, (num_blocks, block_size)).transpose(1, 2)
            blocks.append(store)
        k, v = blocks
        options["block_table"] = table

    output, lse = attend(q, k, v, return_lse=True, **options)
    assert output.dtype == q.dtype
    assert lse.dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)
    assert_close(output, expected)
    seen = expected_lse > -math.inf
    assert ((lse > -math.inf) == seen).all()
    assert torch.allclose(lse.double()[seen], expected_lse[seen], rtol=1e-4, atol=1e-4)
    assert_close(attend(q, k, v, **options), expected)


def test_float64_is_computed_in_float64():
    q, k, v = random_qkv(slots=50)
    expected, expected_lse = attend_rows(q, k, v)
    output, lse = attend(q, k, v, return_lse=True)
    assert_close(output, expected)
    assert_close(lse, expected_lse)


@pytest.mark.parametrize("lengths", [None, [9, 9], [4, 9]])
@pytest.mark.parametrize(
    "dtypes", [*itertools.product(DTYPES, repeat=3)], ids=lambda dtypes: " ".join(map(str, dtypes))
)
def test_query_keys_and_values_may_have_a_dtype_each(lengths, dtypes):
    q, k, v = (x.to(dtype) for x, dtype in zip(random_qkv(), dtypes, strict=True))
    expected, _ = attend_rows(q, k, v, lengths=lengths)
    output = attend(q, k, v, lengths=lengths)
    assert output.dtype == q.dtype
    assert_close(output, expected)


@pytest.mark.parametrize("lengths", [None, [9, 9]])
def test_autocast_changes_nothing(lengths):  # case C9
    q, k, v = random_qkv(dtype=torch.float32)
    expected, _ = attend_rows(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = attend(q, k, v, lengths=lengths)
    assert output.dtype == torch.float32
    assert_close(output, expected)


@pytest.mark.parametrize("lengths", [None, [5]])
def test_gradients_are_right(lengths):
    inputs = [x.requires_grad_() for x in random_qkv(batch=1, heads=2, kv_heads=1, queries=2, slots=5, head_dim=3)]
    assert torch.autograd.gradcheck(lambda q, k, v: attend(q, k, v, lengths=lengths), inputs)


def test_numbers_may_be_numpys():
    q, k, v = random_qkv()
    assert torch.equal(attend(q, k, v, scale=np.float32(0.5)), attend(q, k, v, scale=0.5))
    assert torch.equal(attend(q, k, v, softcap=np.float64(2.0)), attend(q, k, v, softcap=2.0))
    assert torch.equal(attend(q, k, v, window=np.int64(3)), attend(q, k, v, window=3))
    with pytest.raises(InvalidValueError, match="scale is nan"):
        attend(q, k, v, scale=np.float32("nan"))


def test_inputs_are_unchanged():
    inputs = random_qkv()
    before = [x.clone() for x in inputs]
    attend(*inputs, lengths=[3, 9], starts=[1, 0], window=2)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


Q, K, V = random_qkv(dtype=torch.float32)
TABLE = torch.zeros(2, 1, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((Q[0], K, V), {}, InvalidValueError, "q has shape"),
        ((Q.numpy(), K, V), {}, InvalidTypeError, "q is a ndarray"),
        ((Q, K[0], V), {}, InvalidValueError, "k has shape"),
        ((Q, K[:1], V), {}, InvalidValueError, r"k has shape \(1, 2, 9, 8\); expected .* = \(2, any, any, 8\)"),
        ((Q, K, V[:, :, :8]), {}, InvalidValueError, "v has shape"),
        ((Q, K, V[:, :1]), {}, InvalidValueError, "v has shape"),
        ((Q[..., :4], K, V), {}, InvalidValueError, "k has shape"),
        ((Q[..., :0], K[..., :0], V), {}, InvalidValueError, "D = 0"),
        ((Q.int(), K, V), {}, InvalidTypeError, "q has dtype int32"),
        ((Q, K, V.to("meta")), {}, InvalidValueError, "v is on meta; expected cpu"),
        ((Q, K[:, :0], V[:, :0]), {}, InvalidValueError, "k has 0"),
        ((Q, K, V), {"lengths": [1]}, InvalidValueError, "lengths has shape"),
        ((Q, K, V), {"lengths": [1.0, 2.0]}, InvalidTypeError, "lengths has dtype float32"),
        ((Q, K, V), {"lengths": [True, False]}, InvalidTypeError, "lengths has dtype bool"),
        ((Q, K, V), {"lengths": [1, 10]}, InvalidValueError, "lengths holds 10"),
        ((Q, K, V), {"lengths": [-1, 1]}, InvalidValueError, "lengths holds -1"),
        ((Q, K, V), {"lengths": "ab"}, InvalidTypeError, "lengths is a str"),
        ((Q, K, V), {"starts": [0, -2]}, InvalidValueError, "starts holds -2"),
        ((Q, K, V), {"window": 0}, InvalidValueError, "window is 0"),
        ((Q, K, V), {"window": 1.5}, InvalidTypeError, "window is a float"),
        ((Q, K, V), {"sinks": -1}, InvalidValueError, "sinks is -1"),
        ((Q, K, V), {"sinks": True}, InvalidTypeError, "sinks is a bool"),
        ((Q, K, V), {"scale": NAN}, InvalidValueError, "scale is nan"),
        ((Q, K, V), {"scale": "1"}, InvalidTypeError, "scale is a str"),
        ((Q, K, V), {"softcap": 0.0}, InvalidValueError, "softcap is 0.0"),
        ((Q, K, V), {"sink_logits": torch.zeros(2)}, InvalidValueError, "sink_logits has shape"),
        ((Q, K, V), {"return_lse": 1}, InvalidTypeError, "return_lse is a int"),
        ((Q, K, V), {"block_table": [[0]]}, InvalidValueError, "block_table has shape"),
        ((Q, K, V), {"block_table": TABLE + 2}, InvalidValueError, r"block_table holds 2; expected .* \[0, 2\)"),
        ((Q, K, V), {"block_table": TABLE - 1}, InvalidValueError, "block_table holds -1"),
    ],
)
def test_bad_input_is_named(arguments, options, error, message):
    with pytest.raises(error, match=message):
        attend(*arguments, **options)


def test_table_entries_that_nobody_needs_are_ignored():
    q, k, v = random_qkv(batch=2, queries=1, slots=3)
    table = torch.tensor([[0, -1], [1, 99]])
    expected, _ = attend_rows(q, k, v)
    assert_close(attend(q, k, v, block_table=table, lengths=[3, 3]), expected)
