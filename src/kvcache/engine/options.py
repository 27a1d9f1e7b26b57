"""What a request asks for, under the names of transformers' `GenerationConfig`, checked one by one."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from kvcache.checks import check_bool, check_float, check_int
from kvcache.errors import InvalidTypeError, InvalidValueError

MAX_NEW_TOKENS = 256  # where neither the request nor the model says
NGRAM_SIZE, MAX_NGRAM_SIZE = 2, 16  # transformers' default; each size takes memory for every token of the text


@dataclass(frozen=True)
class Options:
    """How a text is continued.

    Args:
        max_new_tokens: tokens to generate at most, >= 1.
        min_new_tokens: tokens before which neither an end token nor a stop string ends the text.
        do_sample: whether tokens are drawn; False: the likeliest.
        temperature: above 0; the scores are divided by it before they are drawn from.
        top_k: draw among the k likeliest; 0: all.
        top_p: draw among the likeliest that sum to this probability, in (0, 1].
        min_p: drop tokens less likely than this share of the likeliest, in [0, 1].
        repetition_penalty: above 1 makes tokens of the text less likely, > 0.
        seed: makes drawing repeatable, whatever runs beside it; None: another one each time.
        num_return_sequences: texts to draw from one prompt, >= 1.
        stop_strings: end the text before the first of these.
        eos_token_id: the ids that end it.
        logprobs: None, or for each token its log-probability and those of so many likeliest ones.
        prompt_lookup_num_tokens: tokens that are proposed at most in a step, those that followed the last n-gram of the
            text before, >= 0; 0: none. The text is the same, in fewer steps where it repeats itself.
        max_matching_ngram_size: tokens of the longest n-gram that is looked for, 1 to 16.
    """

    max_new_tokens: int
    min_new_tokens: int
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int | None
    num_return_sequences: int
    stop_strings: tuple[str, ...]
    eos_token_id: tuple[int, ...]
    logprobs: int | None
    prompt_lookup_num_tokens: int
    max_matching_ngram_size: int

    def limited(self, most: int) -> "Options":
        """Return the options with at most so many new tokens."""
        if self.max_new_tokens <= most:
            return self
        return replace(self, max_new_tokens=most, min_new_tokens=min(self.min_new_tokens, most))


OPTION_NAMES = tuple(field.name for field in fields(Options))


def options_of(config: Any, given: Mapping[str, Any]) -> Options:
    """Return the options of a request: what is given, else what the model's `generation_config` says.

    A temperature of 0 is greedy; with one above 0 tokens are drawn, unless `do_sample=False` is given.

    Raises:
        InvalidTypeError, InvalidValueError: an option is unknown, of the wrong kind or out of range.
    """
    for name in given:
        if name not in OPTION_NAMES:
            raise InvalidValueError(f"unknown option {name!r}; expected some of {', '.join(OPTION_NAMES)}")

    def option(name: str, default: Any) -> Any:
        value = given.get(name)
        if value is None:
            value = getattr(config, name, None)
        return default if value is None else value

    temperature = _number("temperature", option("temperature", 1.0), least=0.0)
    do_sample = check_bool("do_sample", option("do_sample", False))
    if given.get("do_sample") is None and given.get("temperature") is not None:
        do_sample = temperature > 0
    if do_sample and temperature == 0:
        raise InvalidValueError("temperature is 0 and do_sample is True; expected a temperature above 0")
    max_new_tokens = check_int("max_new_tokens", option("max_new_tokens", MAX_NEW_TOKENS), minimum=1)
    min_new_tokens = check_int("min_new_tokens", option("min_new_tokens", 0), minimum=0)
    if min_new_tokens > max_new_tokens:
        raise InvalidValueError(f"min_new_tokens is {min_new_tokens}; expected at most max_new_tokens {max_new_tokens}")
    num_return_sequences = check_int("num_return_sequences", option("num_return_sequences", 1), minimum=1)
    if num_return_sequences > 1 and not do_sample:
        raise InvalidValueError(f"num_return_sequences is {num_return_sequences}; expected 1 without do_sample")
    seed, logprobs = given.get("seed"), given.get("logprobs")
    return Options(
        max_new_tokens,
        min_new_tokens,
        do_sample,
        temperature,
        top_k=check_int("top_k", option("top_k", 0), minimum=0),
        top_p=_number("top_p", option("top_p", 1.0), least=0.0, most=1.0, above=True),
        min_p=_number("min_p", option("min_p", 0.0), least=0.0, most=1.0),
        repetition_penalty=_number("repetition_penalty", option("repetition_penalty", 1.0), least=0.0, above=True),
        seed=None if seed is None else check_int("seed", seed, minimum=0),
        num_return_sequences=num_return_sequences,
        stop_strings=_stop_strings(option("stop_strings", ())),
        eos_token_id=_ids(option("eos_token_id", ())),
        logprobs=None if logprobs is None else check_int("logprobs", logprobs, minimum=0),
        prompt_lookup_num_tokens=check_int(
            "prompt_lookup_num_tokens", option("prompt_lookup_num_tokens", 0), minimum=0
        ),
        max_matching_ngram_size=_ngram_size(option("max_matching_ngram_size", NGRAM_SIZE)),
    )


def _ngram_size(value: Any) -> int:
    size = check_int("max_matching_ngram_size", value, minimum=1)
    if size > MAX_NGRAM_SIZE:
        raise InvalidValueError(f"max_matching_ngram_size is {size}; expected an integer in [1, {MAX_NGRAM_SIZE}]")
    return size


def _number(name: str, value: Any, least: float, most: float = math.inf, above: bool = False) -> float:
    number = check_float(name, value)
    if number > most or number < least or (above and number == least):
        bounds = f"{'above' if above else 'at least'} {least:g}" + ("" if most == math.inf else f", at most {most:g}")
        raise InvalidValueError(f"{name} is {number}; expected a number {bounds}")
    return number


def _stop_strings(value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, (list, tuple)) or not all(isinstance(string, str) for string in strings):
        raise InvalidTypeError(f"stop_strings is {value!r}; expected a string or a list of strings")
    if "" in strings:
        raise InvalidValueError("stop_strings has an empty string; expected at least one character in each")
    return tuple(strings)


def _ids(value: Any) -> tuple[int, ...]:
    ids = value.tolist() if isinstance(value, torch.Tensor) else value
    ids = ids if isinstance(ids, (list, tuple)) else [ids]
    return tuple(check_int("eos_token_id", token, minimum=0) for token in ids)
