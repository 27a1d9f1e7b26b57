"""Cosines and sines of positions, computed once for all steps: tables that grow as texts do."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from kvcache.errors import InvalidValueError

Rotary = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

_FIRST = 1024  # positions of the first tables


class RotaryTable(NamedTuple):
    """For positions (P,), one half of what turns a head, as the other is the same: float32 (P, D / 2), contiguous."""

    cos: torch.Tensor
    sin: torch.Tensor


class RotaryTables:
    """The tables of all kinds of a decoder's positions.

    Args:
        rotary: by name, what returns cosines and sines (P, D) for positions (P,).
        max_positions: for which it may be asked; None: any.
    """

    def __init__(self, rotary: Mapping[str, Rotary], max_positions: int | None) -> None:
        self._rotary = rotary
        self._max_positions = max_positions
        self._length = 0
        self._tables: dict[str, RotaryTable] = {}

    def upto(self, length: int) -> dict[str, RotaryTable]:
        """Return tables of so many positions or more.

        Raises:
            InvalidValueError: there are no more than `max_positions`.
        """
        if self._max_positions is not None and length > self._max_positions:
            raise InvalidValueError(f"a sequence gets {length} tokens; expected at most {self._max_positions}")
        if length > self._length:
            self._grow(max(length, 2 * self._length, _FIRST))
        return self._tables

    @torch.inference_mode(False)
    @torch.no_grad()
    def _grow(self, length: int) -> None:
        if self._max_positions is not None:
            length = min(length, self._max_positions)
        positions = torch.arange(length, device="cpu")
        self._tables = {name: _halved(*rotary(positions)) for name, rotary in self._rotary.items()}
        self._length = length


def _halved(cos: torch.Tensor, sin: torch.Tensor) -> RotaryTable:
    half = cos.shape[-1] // 2
    return RotaryTable(cos[:, :half].float().contiguous(), sin[:, :half].float().contiguous())
