import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcache import KVCache
from kvcache.costs import cache_nbytes, count_qkv_projections
from kvcache.errors import InvalidTypeError, InvalidValueError, KVCacheError

SIZES = {"num_layers": 2, "num_kv_heads": 3, "head_dim": 4, "seq_len": 5}


def count_one_by_one(prompt_len: int, gen_len: int, use_cache: bool) -> int:
    """Walk through the generation, token by token."""
    if use_cache:
        return sum(3 for _ in range(prompt_len)) + sum(3 for _ in range(gen_len))
    return sum(3 * (prompt_len + t) for t in range(1, gen_len + 1))


@pytest.mark.parametrize(
    ("prompt_len", "gen_len", "use_cache", "expected"),
    [
        (100, 200, True, 900),
        (100, 200, False, 120300),
        (5, 1, True, 18),
        (5, 1, False, 18),
        (0, 0, True, 0),
        (0, 0, False, 0),
        (7, 0, True, 21),
        (7, 0, False, 0),
        (0, 4, True, 12),
        (0, 4, False, 30),
    ],
)
def test_the_count_is_the_textbook_one(prompt_len, gen_len, use_cache, expected):
    counted = count_qkv_projections(prompt_len, gen_len, use_cache)
    assert counted == {"total_projections": expected, "with_cache": use_cache}
    assert type(counted["total_projections"]) is int
    assert counted["with_cache"] is use_cache


@given(prompt_len=st.integers(0, 60), gen_len=st.integers(0, 60), use_cache=st.booleans())
def test_the_closed_form_equals_counting_one_by_one(prompt_len, gen_len, use_cache):
    counted = count_qkv_projections(prompt_len, gen_len, use_cache)
    assert counted["total_projections"] == count_one_by_one(prompt_len, gen_len, use_cache)


def test_huge_lengths_are_counted_exactly():
    counted = count_qkv_projections(10**12, 10**12, False)
    assert counted["total_projections"] == 4_500_000_000_001_500_000_000_000


def test_numpy_integers_count_as_integers():
    counted = count_qkv_projections(np.int32(100_000), np.int32(100_000), False)
    assert counted["total_projections"] == count_one_by_one(100_000, 100_000, False)
    assert type(counted["total_projections"]) is int


@pytest.mark.parametrize("name", ["prompt_len", "gen_len"])
@pytest.mark.parametrize("value", [1.0, "1", None, True])
def test_a_length_that_is_no_integer_is_refused(name, value):
    arguments = {"prompt_len": 1, "gen_len": 1, "use_cache": True, name: value}
    with pytest.raises(InvalidTypeError, match=f"{name} is a {type(value).__name__}.*expected an integer"):
        count_qkv_projections(**arguments)


@pytest.mark.parametrize("name", ["prompt_len", "gen_len"])
def test_a_negative_length_is_refused(name):
    arguments = {"prompt_len": 1, "gen_len": 1, "use_cache": False, name: -1}
    with pytest.raises(InvalidValueError, match=f"{name} is -1; expected an integer >= 0"):
        count_qkv_projections(**arguments)


@pytest.mark.parametrize("value", [1, 0, None, "yes", np.True_])
def test_use_cache_must_be_a_bool(value):
    with pytest.raises(InvalidTypeError, match=f"use_cache is a {type(value).__name__}.*expected a bool"):
        count_qkv_projections(1, 1, value)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float16", 23040),
        (torch.bfloat16, 23040),
        (torch.float32, 46080),
        ("float64", 92160),
        ("int8", 30 * 3 * 2 * (64 + 2 * 4)),
        ("int4", 30 * 3 * 2 * (32 + 2 * 4)),
        ("int8/int4", 30 * 3 * (72 + 40)),
    ],
)
def test_smollm2_takes_the_known_bytes_a_token(dtype, expected):
    assert cache_nbytes(30, 3, 64, 1, dtype=dtype) == expected


def test_the_default_is_one_float32_sequence():
    assert cache_nbytes(30, 3, 64, 1) == 46080


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("v_head_dim", [None, 1, 24])
@pytest.mark.parametrize("seq_len", [0, 1, 7])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_bytes_equal_those_of_real_tensors(dtype, v_head_dim, seq_len, batch_size):
    keys = torch.zeros(5, batch_size, 3, seq_len, 16, dtype=dtype)
    values = torch.zeros(5, batch_size, 3, seq_len, v_head_dim or 16, dtype=dtype)
    nbytes = cache_nbytes(5, 3, 16, seq_len, batch_size=batch_size, dtype=dtype, v_head_dim=v_head_dim)
    assert nbytes == keys.nbytes + values.nbytes
    assert type(nbytes) is int


@pytest.mark.parametrize("storage", ["bfloat16", "int8", "int4", ("int8", "int4")])
def test_bytes_equal_those_of_a_cache(storage):
    cache = KVCache(2, 3, 33, max_seq_len=7, v_head_dim=5, storage=storage)
    assert cache_nbytes(1, 3, 33, 7, batch_size=2, dtype=storage, v_head_dim=5) == cache.nbytes


@pytest.mark.parametrize(
    ("name", "minimum"),
    [
        ("num_layers", 1),
        ("num_kv_heads", 1),
        ("head_dim", 1),
        ("seq_len", 0),
        ("batch_size", 1),
        ("v_head_dim", 1),
    ],
)
def test_a_size_that_is_too_small_or_no_integer_is_refused(name, minimum):
    with pytest.raises(InvalidValueError, match=f"{name} is {minimum - 1}; expected an integer >= {minimum}"):
        cache_nbytes(**{**SIZES, name: minimum - 1})
    with pytest.raises(InvalidTypeError, match=f"{name} is a float .*; expected an integer >= {minimum}"):
        cache_nbytes(**{**SIZES, name: 2.0})


@pytest.mark.parametrize("dtype", ["int7", "float8", torch.int64, torch.bool, torch.complex64])
def test_a_dtype_in_which_no_rows_are_kept_is_refused(dtype):
    with pytest.raises(InvalidValueError, match=r"dtype is .*; expected one of float16"):
        cache_nbytes(**SIZES, dtype=dtype)


@pytest.mark.parametrize("dtype", [16, None, float])
def test_a_dtype_of_another_kind_is_refused(dtype):
    with pytest.raises(InvalidTypeError, match=r"dtype is .*; expected one of float16") as caught:
        cache_nbytes(**SIZES, dtype=dtype)
    assert isinstance(caught.value, KVCacheError)
