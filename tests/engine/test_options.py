"""What a request may ask for: transformers' names, the model's own settings, and errors that name what is wrong."""

import math

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from kvcache import InvalidTypeError, InvalidValueError
from kvcache.engine.options import OPTION_NAMES, options_of
from tests.engine.texts import options


def test_without_options_the_likeliest_tokens_up_to_a_limit():
    asked = options()
    assert (asked.max_new_tokens, asked.min_new_tokens, asked.do_sample, asked.temperature) == (256, 0, False, 1.0)
    assert (asked.top_p, asked.min_p, asked.repetition_penalty, asked.seed) == (1.0, 0.0, 1.0, None)
    assert (asked.num_return_sequences, asked.stop_strings, asked.eos_token_id, asked.logprobs) == (1, (), (), None)


def test_what_is_not_given_is_as_the_model_says():
    config = GenerationConfig(do_sample=True, temperature=0.6, top_k=20, top_p=0.9, eos_token_id=[2, 7])
    asked = options_of(config, {"top_k": 5, "temperature": None})
    assert (asked.do_sample, asked.temperature, asked.top_k, asked.top_p) == (True, 0.6, 5, 0.9)
    assert asked.eos_token_id == (2, 7)
    assert options_of(config, {"eos_token_id": []}).eos_token_id == ()


def test_a_temperature_says_whether_tokens_are_drawn():
    assert options(temperature=0.7).do_sample
    assert not options(temperature=0).do_sample
    assert not options(temperature=0.7, do_sample=False).do_sample
    assert not options_of(GenerationConfig(do_sample=True), {"temperature": 0.0}).do_sample
    with pytest.raises(InvalidValueError, match="temperature is 0 and do_sample is True"):
        options(temperature=0, do_sample=True)


def test_ids_and_strings_alone_or_in_lists():
    assert options(eos_token_id=3).eos_token_id == (3,)
    assert options(eos_token_id=torch.tensor([3, 4])).eos_token_id == (3, 4)
    assert options(stop_strings="ab").stop_strings == ("ab",)
    assert options(stop_strings=["ab", "c"]).stop_strings == ("ab", "c")


def test_numbers_of_numpy_are_numbers():
    asked = options(max_new_tokens=np.int64(3), temperature=np.float32(0.5))
    assert (asked.max_new_tokens, asked.temperature) == (3, 0.5)
    assert type(asked.max_new_tokens) is int
    assert type(asked.temperature) is float


def test_an_unknown_option_is_named_beside_those_that_there_are():
    with pytest.raises(
        InvalidValueError, match="unknown option 'max_tokens'; expected some of max_new_tokens"
    ) as caught:
        options(max_tokens=3)
    assert all(name in str(caught.value) for name in OPTION_NAMES)


NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")
COUNTS = ("max_new_tokens", "min_new_tokens", "top_k", "seed", "num_return_sequences", "logprobs", "eos_token_id")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 10**400])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_are_nan_infinite_or_negative_are_refused_by_name(name, value):
    with pytest.raises(InvalidValueError, match=f"^{name} is "):
        options(**{name: value})


@pytest.mark.parametrize("value", ["1", True, [1.0], 1j])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_another_type_are_refused_by_name(name, value):
    with pytest.raises(InvalidTypeError, match=f"^{name} is "):
        options(**{name: value})


@pytest.mark.parametrize("value", [1.5, "1", True, math.nan, {}])
@pytest.mark.parametrize("name", COUNTS)
def test_counts_of_another_type_are_refused_by_name(name, value):
    with pytest.raises(InvalidTypeError, match=f"^{name} is "):
        options(**{name: value})


@pytest.mark.parametrize("name", COUNTS)
def test_counts_below_what_they_may_be_are_refused_by_name(name):
    with pytest.raises(InvalidValueError, match=f"^{name} is -1"):
        options(**{name: -1})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"num_return_sequences": 0}, "num_return_sequences is 0"),
        ({"num_return_sequences": 2}, "num_return_sequences is 2; expected 1 without do_sample"),
        ({"min_new_tokens": 5, "max_new_tokens": 4}, "min_new_tokens is 5; expected at most max_new_tokens 4"),
        ({"top_p": 0.0}, "top_p is 0.0; expected a number above 0, at most 1"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"min_p": 1.1}, "min_p is 1.1; expected a number at least 0, at most 1"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0.0; expected a number above 0"),
        ({"stop_strings": ["a", ""]}, "stop_strings has an empty string"),
        ({"stop_strings": ""}, "stop_strings has an empty string"),
    ],
)
def test_values_out_of_range_are_refused(given, message):
    with pytest.raises(InvalidValueError, match=message):
        options(**given)


@pytest.mark.parametrize(
    ("name", "value"), [("do_sample", 1), ("do_sample", "yes"), ("stop_strings", [1]), ("stop_strings", 5)]
)
def test_flags_and_strings_of_another_type_are_refused_by_name(name, value):
    with pytest.raises(InvalidTypeError, match=f"^{name} is "):
        options(**{name: value})


def test_a_limit_shortens_both_ends():
    asked = options(max_new_tokens=9, min_new_tokens=7)
    assert asked.limited(9) is asked
    shorter = asked.limited(5)
    assert (shorter.max_new_tokens, shorter.min_new_tokens) == (5, 5)
