"""int8 weights: how near they are, and what becomes of groups that are zero or no numbers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcache.decoder import Linear
from kvcache.decoder.weights import WeightMemory, in_int8
from kvcache.storage.codecs import GROUP_SIZE
from tests.decoder.random_decoders import amid_nan, random_decoder
from tests.decoder.reference import weights_of

INF, NAN = float("inf"), float("nan")


def random_weight(rows=5, columns=96, dtype=torch.float32, seed=0, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (size * torch.randn(rows, columns, generator=generator)).to(dtype)


def round_trip(weight):
    return weights_of(in_int8(Linear(weight)))


@given(
    st.integers(0, 2**31), st.sampled_from([1e-20, 1e-3, 1.0, 1e4]), st.sampled_from([torch.float32, torch.bfloat16])
)
def test_no_weight_is_off_by_more_than_half_a_step(seed, size, dtype):
    weight = random_weight(dtype=dtype, seed=seed, size=size)
    linear = in_int8(Linear(weight))
    error = (weights_of(linear) - weight.double()).abs().unflatten(1, (-1, GROUP_SIZE))
    assert (error <= 0.5000001 * linear.scales.double().unsqueeze(-1)).all()
    largest = weight.double().abs().unflatten(1, (-1, GROUP_SIZE)).amax(-1)
    assert (linear.scales.double() <= largest / 127 * (1 + 2**-8)).all()


def test_codes_and_scales_have_their_shapes_and_dtypes_and_the_bias_stays():
    bias = torch.randn(5)
    linear = in_int8(Linear(random_weight(), bias))
    assert (linear.weight.shape, linear.weight.dtype) == ((5, 96), torch.int8)
    assert (linear.scales.shape, linear.scales.dtype) == ((5, 3), torch.bfloat16)
    assert linear.bias is bias
    assert linear.weight.min() >= -127
    assert linear.nbytes == 5 * 96 + 5 * 3 * 2 + 5 * 4


def test_codes_encoded_again_are_the_same():
    once = in_int8(Linear(random_weight()))
    again = in_int8(Linear(weights_of(once).float()))
    assert torch.equal(weights_of(once), weights_of(again))


def test_a_group_of_zeros_stays_zero():
    weight = random_weight()
    weight[2, 32:64] = 0
    weight[3] = -0.0
    back = round_trip(weight)
    assert (back[2, 32:64] == 0).all()
    assert (back[3] == 0).all()


def test_weights_too_small_for_a_scale_become_zero():
    assert (round_trip(torch.full((1, GROUP_SIZE), 1e-44)) == 0).all()


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_one_weight_that_is_no_number_makes_its_group_and_no_other_no_numbers(bad):
    weight = random_weight()
    expected = round_trip(weight)
    weight[1, 40] = bad
    back = round_trip(weight)
    assert back[1, 32:64].isnan().any()
    assert not back[1, 32:64].isfinite().any()
    back[1, 32:64] = expected[1, 32:64]
    assert torch.equal(back, expected)


def test_many_rows_are_encoded_in_parts_and_views_are_read_right():
    weight = random_weight(rows=4100, columns=32)
    assert torch.equal(round_trip(weight)[4090:], round_trip(weight[4090:]))
    assert torch.equal(round_trip(amid_nan(weight, torch.float32)), round_trip(weight))


def test_weights_are_detached():
    weight = torch.nn.Parameter(random_weight())
    assert not in_int8(Linear(weight)).scales.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoded_weights_are_what_codes_stand_for_rounded_once(dtype):
    linear = in_int8(Linear(random_weight()))
    memory = WeightMemory(dtype)
    weight = memory.decoded(linear)
    assert torch.equal(weight, weights_of(linear).to(dtype))
    assert memory.decoded(linear).data_ptr() == weight.data_ptr()


def test_weights_of_the_wanted_dtype_are_themselves_and_others_are_converted():
    weight = random_weight(dtype=torch.bfloat16)
    assert WeightMemory(torch.bfloat16).decoded(Linear(weight)) is weight
    assert torch.equal(WeightMemory(torch.float32).decoded(Linear(weight)), weight.float())


def test_a_step_reads_all_matrices_and_biases_once():
    decoder = random_decoder(windows=(None,), bias=True, dtype=torch.bfloat16)
    attention = (32 + 16 + 16) * 40 + 40 * 32 + 32 + 16 + 16 + 40
    mlp = 3 * 40 * 50 + 50 + 50 + 40
    assert decoder.step_nbytes == 2 * (attention + mlp + 37 * 40 + 37)
    assert decoder.hidden_size == 40
