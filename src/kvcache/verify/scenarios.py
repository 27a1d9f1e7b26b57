"""What people do with a cache, each as a small run whose every output can be held against a run without one."""

from collections.abc import Callable
from dataclasses import dataclass

from kvcache.errors import NotSupportedError
from kvcache.verify.decoder import Decoder
from kvcache.verify.trial import Step, Text, Trial, text_of_length

DECODED = 8  # tokens that a run decodes one at a time
CHUNKS = 3, 5, 16


@dataclass(frozen=True)
class Scenario:
    """One of them: it feeds texts to a decoder with a cache, and returns the steps that it took."""

    name: str
    run: Callable[[Decoder, list[Text]], list[Step]]


def prefill_then_decode(decoder: Decoder, texts: list[Text]) -> list[Step]:
    """A prompt at once, then tokens one by one."""
    text = texts[0]
    trial = Trial(decoder, capacity=len(text))
    trial.feed(text[:-DECODED])
    trial.decode(text[-DECODED:])
    return trial.steps


def chunked_prefill(decoder: Decoder, texts: list[Text]) -> list[Step]:
    """A prompt in chunks of several sizes."""
    text = texts[0]
    steps: list[Step] = []
    for size in CHUNKS:
        trial = Trial(decoder, capacity=len(text), steps=steps)
        for start in range(0, len(text) - 1, size):
            trial.feed(text[start : min(start + size, len(text) - 1)])
        trial.feed(text[-1:])
    return steps


def one_token_at_a_time(decoder: Decoder, texts: list[Text]) -> list[Step]:
    """A text without any prefill."""
    text = texts[1][: 3 * DECODED]
    trial = Trial(decoder, capacity=len(text))
    trial.decode(text)
    return trial.steps


def left_padded_batch(decoder: Decoder, texts: list[Text]) -> list[Step]:
    """Prompts of different lengths, then some tokens at once, then one by one."""
    padding = 0, 3, 11
    prompts = [text[pad:-DECODED] for text, pad in zip(texts, padding, strict=True)]
    trial = Trial(decoder, len(texts), capacity=len(texts[0]))
    trial.feed(*prompts)
    trial.feed(*(text[-DECODED : 3 - DECODED] for text in texts))
    trial.decode(*(text[3 - DECODED :] for text in texts))
    return trial.steps


def batch(decoder: Decoder, texts: list[Text]) -> list[Step]:
    """Texts of one length, each held against itself alone."""
    trial = Trial(decoder, len(texts), capacity=len(texts[0]))
    trial.feed(*(text[:-DECODED] for text in texts))
    trial.decode(*(text[-DECODED:] for text in texts))
    return trial.steps


def rollback_and_retry(decoder: Decoder, texts: list[Text]) -> list[Step]:
    """A draft, dropped, and other tokens in its place; in short texts where a window lets no longer one go."""
    try:
        return _rollback_and_retry(decoder, texts)
    except NotSupportedError:
        longest = min(decoder.windows, default=0) - 1  # tokens of which a window lets none go
        if longest < 4:
            raise
        return _rollback_and_retry(decoder, [text[:longest] for text in texts])


def _rollback_and_retry(decoder: Decoder, texts: list[Text]) -> list[Step]:
    first, second, draft = texts
    drafted = min(4, len(first) // 3)
    middle = len(first) - drafted
    trial = Trial(decoder, 2, capacity=len(first))
    trial.feed(first[: middle - 1], second[: middle - 1])
    trial.decode(draft[:drafted], draft[drafted:][:drafted])  # rejected
    trial.rollback(drafted)
    trial.feed(first[middle - 1 : middle + 1], second[middle - 1 : middle + 1])
    trial.rollback(1)
    trial.decode(first[middle:], second[middle:])
    return trial.steps


def fork(decoder: Decoder, texts: list[Text]) -> list[Step]:
    """Two continuations of each of two prompts, in turns."""
    first, second, other = texts
    middle = len(first) // 2 + 1
    trial = Trial(decoder, 2, capacity=len(first))
    trial.feed(first[:middle], second[:middle])
    branch = trial.fork()
    for tokens in zip(first[middle:][:DECODED], second[middle:], other, strict=False):
        trial.feed(tokens[:1], tokens[1:2])
        branch.feed(tokens[2:], tokens[:1])
    return trial.steps


def window_wrap_around(decoder: Decoder, texts: list[Text]) -> list[Step]:
    """Prompts and chunks that end before, at and behind each window."""
    if not decoder.windows:
        raise NotSupportedError("no layer has a window")
    steps: list[Step] = []
    for window in decoder.windows:
        text = text_of_length(texts, window + 2 * DECODED)
        if decoder.max_tokens is not None and len(text) > decoder.max_tokens:
            raise NotSupportedError(f"the model takes {decoder.max_tokens} tokens, {len(text)} were needed")
        for first, chunk in ((max(1, window - 3), 1), (window, 2), (window + 2, 3)):
            trial = Trial(decoder, capacity=len(text), steps=steps)
            trial.feed(text[:first])
            trial.feed(text[first : first + chunk])
            trial.decode(text[first + chunk :][:DECODED])
    return steps


def reorder(decoder: Decoder, texts: list[Text]) -> list[Step]:
    """Rows of the batch exchanged and repeated, as beam search does."""
    trial = Trial(decoder, 3, capacity=len(texts[0]))
    middle = len(texts[0]) // 2
    trial.feed(*(text[:middle] for text in texts))
    for index in ((2, 0, 0), (1, 1, 2), (0, 2, 1)):
        trial.reorder(index)
        length = len(trial.texts[0])
        trial.decode(*(text[length : length + 2] for text in texts))
    return trial.steps


def full_cache(decoder: Decoder, texts: list[Text]) -> list[Step]:
    """As many tokens as there is room for, then more: refused, changing nothing, or right."""
    text = texts[0]
    capacity = len(text) - DECODED
    trial = Trial(decoder, capacity=capacity)
    trial.feed(text[: capacity - 2])
    trial.decode(text[capacity - 2 : capacity])
    try:
        trial.decode(text[capacity:])  # must be refused, or right
    except Exception:
        try:
            trial.rollback(1)
        except NotSupportedError:
            return trial.steps
        trial.feed(text[capacity - 1 : capacity])  # what was refused has changed nothing
    return trial.steps


def save_and_restore(decoder: Decoder, texts: list[Text]) -> list[Step]:
    """A saved cache of two texts goes on, and so does the original."""
    first, second, other = texts
    trial = Trial(decoder, 2, capacity=len(first))
    trial.feed(first[:-DECODED], second[:-DECODED])
    restored = trial.saved_and_restored()
    trial.decode(other[:2], first[:2])
    restored.decode(first[-DECODED:], second[-DECODED:])
    return trial.steps


SCENARIOS = (
    Scenario("prefill, then decode", prefill_then_decode),
    Scenario("chunked prefill", chunked_prefill),
    Scenario("one token at a time", one_token_at_a_time),
    Scenario("left-padded batch", left_padded_batch),
    Scenario("batch", batch),
    Scenario("rollback and retry", rollback_and_retry),
    Scenario("fork", fork),
    Scenario("window wrap-around", window_wrap_around),
    Scenario("reorder", reorder),
    Scenario("full cache", full_cache),
    Scenario("save and restore", save_and_restore),
)
