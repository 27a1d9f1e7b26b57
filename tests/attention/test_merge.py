import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcache import InvalidTypeError, InvalidValueError, attend, merge_attention
from tests.attention.random_inputs import DTYPES, NAN, random_qkv
from tests.oracle import assert_close, attend_rows


@given(cuts=st.lists(st.integers(0, 9), max_size=4), dtype=st.sampled_from(DTYPES))
def test_merged_parts_equal_the_whole(cuts, dtype):
    q, k, v = random_qkv(queries=1, dtype=dtype)
    sink_logits = [0.5, 1.0, -1.0, 2.0]
    expected, expected_lse = attend_rows(q, k, v, sink_logits=sink_logits)
    bounds = [0, *sorted(cuts), 9]
    parts = []
    for start, end in itertools.pairwise(bounds):
        logits = torch.tensor(sink_logits) if start == 0 and not parts else None
        parts.append(attend(q, k[:, :, start:end], v[:, :, start:end], sink_logits=logits, return_lse=True))
    output, lse = merge_attention(*zip(*parts, strict=True))
    assert output.dtype == dtype
    assert_close(output, expected)
    assert_close(lse, expected_lse)


def test_merging_ignores_what_a_part_without_weight_holds():
    output = torch.full((1, 1, 2, 3), 5.0)
    empty = torch.full_like(output, NAN)
    nothing = torch.full((1, 1, 2), -math.inf)
    merged, lse = merge_attention([output, empty], [torch.zeros(1, 1, 2), nothing])
    assert (merged == 5.0).all()
    assert (lse == 0.0).all()
    merged, lse = merge_attention([empty, empty], [nothing, nothing])
    assert (merged == 0.0).all()
    assert (lse == -math.inf).all()


Q, _, _ = random_qkv(dtype=torch.float32)


@pytest.mark.parametrize(
    ("outputs", "lses", "error", "message"),
    [
        ([], [], InvalidValueError, "outputs has 0 parts"),
        ([Q], [], InvalidValueError, "outputs has 1 parts and lses has 0"),
        ([Q, Q[:1]], [Q[..., 0], Q[:1, ..., 0]], InvalidValueError, r"outputs\[1\] has shape"),
        ([Q], [Q], InvalidValueError, r"lses\[0\] has shape"),
        ([Q, Q.double()], [Q[..., 0]] * 2, InvalidTypeError, r"outputs\[1\] has dtype"),
        (3, [Q[..., 0]], InvalidTypeError, "outputs is a int; expected a sequence of tensors"),
        ([Q], None, InvalidTypeError, "lses is a NoneType; expected a sequence of tensors"),
        ([1.0], [Q[..., 0]], InvalidTypeError, r"outputs\[0\] is a float"),
    ],
)
def test_bad_parts_are_named(outputs, lses, error, message):
    with pytest.raises(error, match=message):
        merge_attention(outputs, lses)
