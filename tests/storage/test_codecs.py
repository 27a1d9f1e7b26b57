"""Codecs against their description, read byte by byte in Python's own float64 numbers."""

import math
import struct

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given

from kvcache import InvalidTypeError, InvalidValueError, KVCache
from kvcache.storage.codecs import CODECS, EncodedRows, FloatCodec, GroupCodec, Storage, check_storage

NAN, INF = float("nan"), float("inf")
LARGEST_FLOAT16 = 65504.0
HEAD_DIMS = (1, 8, 24, 33, 64, 96, 128)
FLOAT_NAMES = ("float16", "bfloat16", "float32", "float64")

both_codecs = pytest.mark.parametrize("codec", [GroupCodec(8), GroupCodec(4)], ids=lambda codec: codec.name)
every_head_dim = pytest.mark.parametrize("head_dim", HEAD_DIMS)


def random_rows(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def levels_of(data, bits, head_dim):
    """Return, for each channel of one encoded row, all values that its code could stand for, and the code."""
    data, groups, top = bytes(data.tolist()), -(-head_dim // 32), 2**bits - 1
    offsets = struct.unpack(f"{groups}e", data[: 2 * groups])
    steps = [
        struct.unpack("f", struct.pack("I", step << 15))[0]
        for step in struct.unpack(f"{groups}H", data[2 * groups : 4 * groups])
    ]
    codes = list(data[4 * groups :])
    if bits == 4:
        codes = [half for byte in codes for half in (byte % 16, byte // 16)][:head_dim]
    assert len(codes) == head_dim
    for channel, code in enumerate(codes):
        offset, step = offsets[channel // 32], steps[channel // 32]
        yield [offset + level * step for level in range(top + 1)], code


def spacing_of_float16_at(value):
    """Return how far apart the float16 numbers are at the one nearest to `value`."""
    nearest = struct.unpack("e", struct.pack("e", value))[0]
    return 2.0**-24 if abs(nearest) < 2.0**-14 else 2.0 ** (math.frexp(nearest)[1] - 11)


def groups_of(row):
    values = row.tolist()
    return [values[start : start + 32] for start in range(0, len(values), 32)]


def check_error(codec, rows):
    """Check that no value of `rows` (..., D) is further off than half a step of its group, and float32 rounding."""
    decoded = codec.decode(codec.encode(rows), rows.shape[-1], torch.float32)
    assert decoded.shape == rows.shape
    top = 2**codec.bits - 1
    for row, kept in zip(rows.flatten(0, -2), decoded.flatten(0, -2), strict=True):
        for values, outcomes in zip(groups_of(row), groups_of(kept), strict=True):
            smallest, largest = min(values), max(values)
            step = max((largest - smallest) / top, spacing_of_float16_at(smallest))
            # The offset is up to half a spacing below the smallest value, and a step has 9 bits.
            bound = step / 2 * (1 + 1 / (2 * top) + 2**-9) + 2**-23 * max(map(abs, values))
            errors = [abs(value - outcome) for value, outcome in zip(values, outcomes, strict=True)]
            assert max(errors) <= bound


# What a row is kept as


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        # The offset 1.0 is 0x3C00; a step of 0.5 is 0x3F000000 and 15 bits less 0x7E00; then the codes.
        ("int8", [1.0, 128.5, 3.0], [0x00, 0x3C, 0x00, 0x7E, 0, 255, 4]),
        ("int4", [1.0, 8.5, 3.0], [0x00, 0x3C, 0x00, 0x7E, 0xF0, 0x04]),
        ("int8", [-2.0], [0x00, 0xC0, 0x00, 0x76, 0]),  # no wider than a number: the spacing at 2, 2**-9
        # Two groups: both offsets, both steps, codes. The first is 0 .. 255 in steps of 1, the second 2 alone.
        ("int8", [255.0] + [0.0] * 31 + [2.0], [0, 0, 0, 0x40, 0, 0x7F, 0, 0x76, 255] + [0] * 32),
        ("int4", [0.0] * 31 + [15.0] + [2.0], [0, 0, 0, 0x40, 0, 0x7F, 0, 0x76] + [0] * 15 + [0xF0, 0]),
    ],
)
def test_bytes_by_hand(name, values, expected):
    codec, row = CODECS[name], torch.tensor(values)
    assert codec.encode(row).tolist() == expected
    assert codec.decode(torch.tensor(expected, dtype=torch.uint8), len(values), torch.float32).tolist() == values


@both_codecs
@every_head_dim
def test_bytes_mean_what_the_description_says_and_codes_are_the_nearest(codec, head_dim):
    rows = random_rows(20, head_dim) * torch.logspace(-6, 4, 20)[:, None] + random_rows(20, 1, seed=1)
    data = codec.encode(rows)
    decoded = codec.decode(data, head_dim, torch.float32)
    for row, kept, outcome in zip(rows, data, decoded, strict=True):
        for channel, (levels, code) in enumerate(levels_of(kept, codec.bits, head_dim)):
            value = row[channel].item()
            assert outcome[channel].item() == torch.tensor(levels[code], dtype=torch.float32).item()
            nearest = min(abs(value - level) for level in levels)
            assert abs(value - levels[code]) <= nearest + 2**-22 * abs(value)


@both_codecs
@every_head_dim
def test_a_row_takes_a_code_a_channel_and_4_bytes_a_group(codec, head_dim):
    expected = {1: (5, 5), 8: (12, 8), 24: (28, 16), 33: (41, 25), 64: (72, 40), 96: (108, 60), 128: (144, 80)}
    width = expected[head_dim][codec.bits == 4]
    assert codec.width(head_dim) == codec.nbytes(head_dim) == width
    data = codec.encode(random_rows(2, 3, head_dim))
    assert data.shape == (2, 3, width)
    assert data.dtype == codec.dtype == torch.uint8
    assert data.untyped_storage().nbytes() == data.nbytes == 2 * 3 * width


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_bytes_beside_bfloat16(head_dim):
    bfloat16 = CODECS["bfloat16"].nbytes(head_dim)
    assert bfloat16 == 2 * head_dim
    assert CODECS["int8"].nbytes(head_dim) / bfloat16 <= 0.57
    assert CODECS["int4"].nbytes(head_dim) / bfloat16 <= 0.32


# How near the numbers stay


@both_codecs
@every_head_dim
@pytest.mark.parametrize("offset", [0.0, 1.0, -100.0, 3000.0, -60000.0])
@pytest.mark.parametrize("scale", [1e-8, 1e-3, 1.0, 300.0])
def test_errors_are_at_most_half_a_step(codec, head_dim, offset, scale):  # case G1
    check_error(codec, random_rows(6, head_dim) * scale + offset)
    check_error(codec, torch.rand(6, head_dim, generator=torch.Generator().manual_seed(2)) * scale + offset)


@both_codecs
@every_head_dim
def test_channels_of_different_size_share_only_their_group(codec, head_dim):  # case G1
    sizes = 10.0 ** (torch.arange(head_dim) // 32 * 2 - 3)
    check_error(codec, random_rows(6, head_dim) * sizes)


@pytest.mark.parametrize("head_dim", [24, 33, 65])
def test_lanes_that_are_not_there_do_not_widen_a_group(head_dim):  # case G3
    rows = torch.stack([torch.linspace(100, 101, head_dim), 100 + torch.rand(head_dim)])
    codec = GroupCodec(4)
    decoded = codec.decode(codec.encode(rows), head_dim, torch.float32)
    assert (decoded - rows)[0].abs().max() <= 1 / 15 / 2 * (1 + 2**-8)
    assert (decoded - rows)[1].abs().max() <= 1 / 15 / 2 * (1 + 1 / 30 + 2**-8)
    if head_dim % 32 == 1:  # a channel alone in its group
        assert (decoded - rows)[:, -1].abs().max() <= 2**-5  # half the spacing of float16 numbers at 100


@pytest.mark.parametrize("storage", ["int8", "int4"])
def test_late_tokens_a_hundred_times_larger_are_as_good_and_early_ones_unharmed(storage):  # case G9
    codec, k = CODECS[storage], random_rows(1, 2, 24, 40)
    k[:, :, 4:] *= 100
    cache = KVCache(1, 2, 40, 24, storage=storage)
    cache.append(k[:, :, :4], -k[:, :, :4])
    early = [rows.clone() for rows in cache.stored_rows()]
    cache.append(k[:, :, 4:], -k[:, :, 4:])
    for rows, before in zip(cache.stored_rows(), early, strict=True):
        assert torch.equal(rows[:, :, :4], before)
    assert torch.equal(cache.k_cache, codec.encode(k))
    for sign, rows in zip((1, -1), cache.decoded_rows(), strict=True):
        errors = (rows - sign * k).abs()
        top = 2**codec.bits - 1
        for tokens, size in ((slice(4), 1), (slice(4, None), 100)):
            assert errors[:, :, tokens].max() <= 8 * size / top / 2  # no group is wider than 8 standard deviations
    check_error(codec, k)


# Encoding again


SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1e-38, 2.0**-25, 2.0**-24, 6.1e-5, 1e-8, -1e-8, 2048.5, 65504.0, -65504.0, 65520.0]
numbers = st.sampled_from(SPECIAL) | st.floats(-1e5, 1e5, width=32) | st.floats(-1.0, 1.0, width=32)


def check_idempotent(codec, rows):
    data = codec.encode(rows)
    decoded = codec.decode(data, rows.shape[-1], torch.float32)
    assert decoded.isfinite().all()
    assert torch.equal(codec.encode(decoded), data)


@both_codecs
@given(values=st.lists(numbers, min_size=1, max_size=70))
@example(values=[-0.0] * 33)
@example(values=SPECIAL)
@example(values=[65519.0, 65521.0])
@example(values=[-1e5, 1e5, 3.0])
@example(values=[3.4e38, -3.4e38, 1.0])
def test_encoding_a_decoded_row_changes_nothing(codec, values):
    check_idempotent(codec, torch.tensor(values))


@both_codecs
@given(
    seed=st.integers(0, 2**32),
    head_dim=st.sampled_from(HEAD_DIMS),
    scale=st.floats(-8, 5),
    offset=st.sampled_from([0.0]) | st.floats(-1e5, 1e5),
    uniform=st.booleans(),
)
def test_encoding_decoded_random_rows_changes_nothing(codec, seed, head_dim, scale, offset, uniform):
    generator = torch.Generator().manual_seed(seed)
    rows = (torch.rand if uniform else torch.randn)(40, head_dim, generator=generator)
    check_idempotent(codec, rows * 10**scale + offset)


@both_codecs
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.0, 1e-3, 0.1, 2.0**-24, 1e-8, 77.7, 65504.0, -65504.0])
def test_constant_rows_are_the_nearest_float16_number(codec, value):
    row = torch.full((33,), value)
    decoded = codec.decode(codec.encode(row), 33, torch.float32)
    assert torch.equal(decoded, row.half().float())
    assert not decoded[decoded == 0].signbit().any()


@both_codecs
def test_numbers_below_what_float16_holds_are_kept_as_its_smallest(codec):
    row = torch.tensor([-1e6, -65504.0, -65504.0])
    assert codec.decode(codec.encode(row), 3, torch.float32).tolist() == [-LARGEST_FLOAT16] * 3


# What is no number


@both_codecs
@every_head_dim
def test_zero_bytes_are_zeros_and_bytes_of_255_are_nan(codec, head_dim):
    data = torch.zeros(2, codec.width(head_dim), dtype=torch.uint8)
    assert (codec.decode(data, head_dim, torch.float64) == 0).all()
    assert codec.decode(data + 255, head_dim, torch.float64).isnan().all()


@both_codecs
@pytest.mark.parametrize("bad", [NAN, -NAN, INF])
@pytest.mark.parametrize("channel", [0, 31, 32, 63, 64, 69])
def test_what_is_no_number_spoils_its_own_group_only(codec, bad, channel):
    rows = random_rows(3, 70)
    good = codec.decode(codec.encode(rows), 70, torch.float32)
    rows[1, channel] = bad
    decoded = codec.decode(codec.encode(rows), 70, torch.float32)
    group = slice(channel // 32 * 32, channel // 32 * 32 + 32)
    assert decoded[1, group].isnan().all()
    decoded[1, group] = good[1, group]
    assert torch.equal(decoded, good)


# Dtypes and layouts


@both_codecs
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes_are_cast_by_value(codec, dtype):
    rows = random_rows(5, 33).to(dtype)
    data = codec.encode(rows)
    assert torch.equal(data, codec.encode(rows.float()))
    decoded = codec.decode(data, 33, dtype)
    assert decoded.dtype == dtype
    assert torch.equal(decoded, codec.decode(data, 33, torch.float32).to(dtype))


@both_codecs
@pytest.mark.parametrize("head_dim", [1, 24, 33, 64])
def test_rows_of_any_layout_are_encoded_by_value(codec, head_dim):
    rows = random_rows(2, 5, 3, head_dim)
    nan = torch.full_like(rows, NAN)
    for strided in (
        rows.transpose(1, 2).contiguous().transpose(1, 2),
        rows.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        torch.stack([rows, nan], dim=-1)[..., 0],
        torch.cat([nan, rows, nan], dim=2)[:, :, 3:6],
        torch.cat([nan, rows, nan], dim=3)[..., head_dim : 2 * head_dim],
    ):
        assert torch.equal(strided, rows)
        assert not strided.is_contiguous()
        assert torch.equal(codec.encode(strided), codec.encode(rows))
        assert torch.equal(strided, rows)
    expanded = rows[:1, :, :, :1].expand(2, 5, 3, head_dim)
    assert torch.equal(codec.encode(expanded), codec.encode(expanded.contiguous()))


@both_codecs
@pytest.mark.parametrize("head_dim", [1, 24, 33, 64])  # odd widths among them: no number is where its size asks for
def test_bytes_of_any_layout_are_decoded_by_value(codec, head_dim):
    data = codec.encode(random_rows(2, 5, 3, head_dim))
    expected = codec.decode(data, head_dim, torch.float32)
    poison = torch.full_like(data, 255)
    odd = torch.empty(data.numel() + 1, dtype=torch.uint8)[1:].view(data.shape).copy_(data)
    for strided in (
        odd,
        torch.cat([poison, data, poison], dim=2)[:, :, 3:6],
        torch.stack([data, poison], dim=2)[:, :, 0],
        torch.stack([data, poison], dim=-1)[..., 0],
        data.transpose(1, 2).contiguous().transpose(1, 2),
        data.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    ):
        assert torch.equal(codec.decode(strided, head_dim, torch.float32), expected)
        assert torch.equal(strided, data)
    expanded = data[:, :1].expand(2, 5, 3, -1)
    assert torch.equal(codec.decode(expanded, head_dim, torch.float32), expected[:, :1].expand(2, 5, 3, -1))


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("head_dim", [1, 24, 33, 64])
@pytest.mark.parametrize("shape", [(0,), (2, 2, 0)])
def test_no_rows_are_kept_as_none(name, head_dim, shape):
    codec = CODECS[name]
    kept = codec.encode(torch.empty(*shape, head_dim))
    assert kept.shape == (*shape, codec.width(head_dim))
    assert kept.dtype == codec.dtype
    assert codec.decode(kept, head_dim, torch.float32).shape == (*shape, head_dim)


@pytest.mark.parametrize("name", FLOAT_NAMES)
def test_float_codecs_cast_by_value_and_copy_only_what_changes(name):
    codec, rows = CODECS[name], random_rows(3, 5).double()
    dtype = getattr(torch, name)
    kept = codec.encode(rows)
    assert (codec.name, codec.dtype, codec.width(5), codec.nbytes(5)) == (name, dtype, 5, 5 * dtype.itemsize)
    assert kept.dtype == dtype
    assert torch.equal(kept, rows.to(dtype))
    assert codec.encode(kept) is kept
    assert codec.decode(kept, 5, dtype) is kept
    assert codec.readable(kept, 5) is kept
    assert torch.equal(codec.decode(kept, 5, torch.float64), rows.to(dtype).double())
    assert torch.equal(codec.encode(codec.decode(kept, 5, torch.float64)), kept)


@both_codecs
def test_readable_rows_tell_the_shape_that_they_have_when_decoded(codec):
    data = codec.encode(random_rows(2, 3, 4, 33))
    rows = codec.readable(data, 33)
    assert isinstance(rows, EncodedRows)
    assert rows.data is data
    assert (rows.shape, rows.device) == ((2, 3, 4, 33), torch.device("cpu"))
    assert torch.equal(rows.decode(torch.float64), codec.decode(data, 33, torch.float64))
    fewer = rows.with_data(data[:1, :, 2:])
    assert fewer.shape == (1, 3, 2, 33)
    assert torch.equal(fewer.decode(torch.float32), rows.decode(torch.float32)[:1, :, 2:])


# Names


@pytest.mark.parametrize(
    ("value", "k", "v", "name"),
    [
        ("int8", "int8", "int8", "int8"),
        ("bfloat16", "bfloat16", "bfloat16", "bfloat16"),
        (torch.float16, "float16", "float16", "float16"),
        ("int8/int4", "int8", "int4", "int8/int4"),
        ("int4/int4", "int4", "int4", "int4"),
        (("int8", "int4"), "int8", "int4", "int8/int4"),
        (["float32", "int8"], "float32", "int8", "float32/int8"),
        (("int8", torch.bfloat16), "int8", "bfloat16", "int8/bfloat16"),
        (["int4"], "int4", "int4", "int4"),
        (Storage(CODECS["int4"], CODECS["float64"]), "int4", "float64", "int4/float64"),
    ],
)
def test_storage_is_one_name_or_two(value, k, v, name):
    storage = check_storage("storage", value)
    assert storage == Storage(CODECS[k], CODECS[v])
    assert storage.name == name
    assert check_storage("storage", storage.name) == storage


def test_codecs_are_known_by_their_names():
    assert list(CODECS) == [*FLOAT_NAMES, "int8", "int4"]
    assert all(codec.name == name for name, codec in CODECS.items())
    assert CODECS["int8"] == GroupCodec(8) != GroupCodec(4)
    assert CODECS["float32"] == FloatCodec(torch.float32)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("int9", InvalidValueError, "rows is 'int9'; expected one of float16, bfloat16, float32, float64, int8, int4"),
        ("", InvalidValueError, "rows is ''; expected one of"),
        ("int8/", InvalidValueError, "rows is 'int8/'; expected one of"),
        ("int8/int9", InvalidValueError, "rows is 'int8/int9'; expected one of .* or two as in 'int8/int4'"),
        ("int8/int4/int8", InvalidValueError, "rows is 'int8/int4/int8'; expected one entry, or one for the keys"),
        ((), InvalidValueError, r"rows is \(\); expected one entry, or one for the keys and one for the values"),
        (["int8"] * 3, InvalidValueError, "rows is .*; expected one entry"),
        (torch.uint8, InvalidValueError, "rows is torch.uint8; expected one of"),
        (("int8", 4), InvalidTypeError, r"rows is \('int8', 4\); expected one of"),
        (8, InvalidTypeError, "rows is 8; expected one of"),
        (None, InvalidTypeError, "rows is None; expected one of"),
        ({"int8"}, InvalidTypeError, "rows is {'int8'}; expected one of"),
        (("int8", ["int4"]), InvalidTypeError, "rows is .*; expected one of"),
    ],
)
def test_what_names_no_storage_is_refused_by_the_arguments_name(value, error, message):
    with pytest.raises(error, match=message):
        check_storage("rows", value)


@both_codecs
def test_rows_that_a_codec_does_not_make_are_refused(codec):
    data = codec.encode(random_rows(1, 2, 5, 64))
    assert EncodedRows(codec, data, 64).shape == (1, 2, 5, 64)
    other = GroupCodec(12 - codec.bits)
    for wrong, of, head_dim in ((data[..., :8], codec, 64), (data, codec, 32), (data, other, 64)):
        with pytest.raises(InvalidValueError, match=f"data has {wrong.shape[-1]} bytes a row; expected"):
            EncodedRows(of, wrong, head_dim)
    with pytest.raises(InvalidTypeError, match="data has dtype float32; expected uint8"):
        EncodedRows(codec, data.float(), 64)
