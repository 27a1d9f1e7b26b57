"""One run of a scenario: what was fed to a decoder with a cache, which texts that made, and what came out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvcache.verify.decoder import Decoder

Text = tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """The outputs of one forward with a cache."""

    texts: list[Text]  # of each row of the batch, the new tokens included
    num_tokens: int  # new ones of each row
    outputs: torch.Tensor  # (B, T, V), on the CPU

    def places(self) -> Iterator[tuple[int, int, Text]]:
        """Yield (row, index in the step, text up to that token) of each output that is not of padding."""
        for row, text in enumerate(self.texts):
            for index in range(self.num_tokens):
                length = len(text) - self.num_tokens + index + 1
                if length > 0:
                    yield row, index, text[:length]


class Trial:
    """A decoder with one cache for a batch of texts, and the record of its outputs.

    What a scenario does to the cache is done to the texts too, so that each output can be held against what the decoder
    says of the same text without a cache.
    """

    def __init__(
        self,
        decoder: Decoder,
        batch_size: int = 1,
        *,
        capacity: int,
        pad_token: int = 0,
        steps: list[Step] | None = None,
    ) -> None:
        self.decoder = decoder
        self.steps: list[Step] = [] if steps is None else steps
        self._pad_token = pad_token
        self._texts: list[Text] = [()] * batch_size
        self._cache: Any = decoder.new_cache(batch_size, capacity)

    @property
    def texts(self) -> list[Text]:
        """What the cache holds, row by row, without padding."""
        return self._texts

    def feed(self, *rows: Sequence[int]) -> torch.Tensor:
        """Run the next tokens of each row; return the outputs (B, T, V).

        The first tokens may be of different numbers: rows are then padded on the left to the longest.
        """
        length = max(map(len, rows))
        padding = [length - len(row) for row in rows]
        tokens = [[self._pad_token] * pad + list(row) for pad, row in zip(padding, rows, strict=True)]
        outputs = self.decoder.forward(
            self._tensor(tokens), self._cache, self._tensor(padding) if any(padding) else None
        )
        self._texts = [(*text, *row) for text, row in zip(self._texts, rows, strict=True)]
        self.steps.append(Step(list(self._texts), length, outputs.detach().cpu()))
        return self.steps[-1].outputs

    def decode(self, *rows: Sequence[int]) -> None:
        """Run the next tokens of each row one at a time."""
        for tokens in zip(*rows, strict=True):
            self.feed(*([token] for token in tokens))

    def rollback(self, num_tokens: int) -> None:
        """Drop the last tokens of each row."""
        self.decoder.rollback(self._cache, num_tokens)
        self._texts = [text[: len(text) - num_tokens] for text in self._texts]

    def reorder(self, index: Sequence[int]) -> None:
        """Let row b continue what row `index[b]` holds."""
        self.decoder.reorder(self._cache, self._tensor(index))
        self._texts = [self._texts[row] for row in index]

    def fork(self) -> "Trial":
        """Return a trial that goes on from here by itself, in the same record."""
        return self._with(self.decoder.fork(self._cache))

    def saved_and_restored(self) -> "Trial":
        """Return a trial over what a program would load after it has saved this one's cache."""
        return self._with(self.decoder.restore(self.decoder.save(self._cache)))

    def _tensor(self, numbers: Sequence[Any]) -> torch.Tensor:
        return torch.tensor(numbers, device=self.decoder.device)

    def _with(self, cache: Any) -> "Trial":
        other = object.__new__(Trial)
        other.__dict__.update(self.__dict__, _texts=list(self._texts), _cache=cache)
        return other


def text_of_length(texts: Sequence[Text], length: int) -> Text:
    """Return one text of `length` tokens: the texts one behind the other, as often as that takes."""
    joined = sum(texts, ())
    return (joined * (length // len(joined) + 1))[:length]


class Texts:
    """What a decoder says of whole texts; a text is run once, with all texts that it begins with."""

    def __init__(self, run: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> None:
        self._run, self._device = run, device
        self._known: dict[Text, torch.Tensor] = {}

    def prepare(self, steps: Sequence[Step]) -> None:
        """Run the texts of these steps, the longest first."""
        for text in sorted({text for step in steps for text in step.texts}, key=len, reverse=True):
            self.output(text)

    def output(self, text: Text) -> torch.Tensor:
        """Return the output (V,) after the last token of a text, on the CPU."""
        for known, outputs in self._known.items():
            if known[: len(text)] == text:
                return outputs[len(text) - 1]
        outputs = self.run(text)
        self._known[text] = outputs
        return outputs[-1]

    def run(self, text: Text) -> torch.Tensor:
        """Run one text; return its outputs (T, V), on the CPU."""
        return self._run(torch.tensor([text], device=self._device))[0].detach().cpu()


def uncached(decoder: Decoder) -> Texts:
    """Return what a decoder says of texts without a cache."""
    return Texts(decoder.forward, decoder.device)


def as_stored(decoder: Decoder) -> Texts:
    """Return what it says without a cache of texts whose keys and values are rounded as its cache rounds them.

    Where it is not known how a cache rounds, each text is given to a new one, all at once.
    """

    def run(tokens: torch.Tensor) -> torch.Tensor:
        outputs = decoder.forward_through_codec(tokens)
        if outputs is not None:
            return outputs
        return decoder.forward(tokens, decoder.new_cache(*tokens.shape) if decoder.is_lossy else None)

    return Texts(run, decoder.device)
