"""Figures as people read them, and sizes as they write them."""

import re

from kvcache.errors import InvalidValueError

_UNITS = {"": 1, "b": 1} | {
    f"{letter}{infix}b": base**power
    for power, letter in enumerate("kmgt", start=1)
    for infix, base in (("", 1000), ("i", 1024))
}


def rate(tokens_per_second: float) -> str:
    """Return tokens a second with their unit."""
    return f"{tokens_per_second:,.1f} tokens/s"


def seconds(duration: float) -> str:
    """Return seconds, or milliseconds below one second; below ten with a digit more."""
    if duration >= 1:
        return f"{duration:.2f} s"
    milliseconds = duration * 1000
    return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.2g} ms"


def count(number: int, noun: str) -> str:
    """Return "1 token", "2 tokens"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def size(nbytes: int) -> str:
    """Return bytes in the largest decimal unit that they fill."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= factor:
            return f"{nbytes / factor:,.1f} {unit}"
    return f"{nbytes} bytes"


def parse_size(name: str, text: str) -> int:
    """Return the bytes that `text` names: "2GiB" (1024 each), "500MB" (1000 each), "1.5 GB", or a number of bytes.

    >>> parse_size("--memory", "2GiB"), parse_size("--memory", "1.5 GB")
    (2147483648, 1500000000)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text, re.ASCII | re.IGNORECASE)
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise InvalidValueError(f"{name} is {text!r}; expected a size such as 2GiB, 500MB, or a number of bytes")
    nbytes = int(match[1]) * factor if match[1].isdecimal() else int(float(match[1]) * factor)
    if nbytes < 1:
        raise InvalidValueError(f"{name} is {text!r}; expected at least one byte")
    return nbytes
