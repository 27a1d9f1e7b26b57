"""Figures as people read them."""


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
