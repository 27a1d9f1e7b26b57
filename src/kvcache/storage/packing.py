"""How the new tokens of several sequences lie in one row without padding, and where their keys and values go.

sequences   a: 2 new tokens    b: 1     c: 2            N = 5
packed      a0  a1             b0       c0  c1          (1, heads, N, head size)
groups      (a, c) with T = 2, (b) with T = 1           attention takes each group in one call
"""

from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch

from kvcache.storage.table import BlockTable


class Group(NamedTuple):
    """Sequences with equally many new tokens."""

    members: list[int]  # their places among the sequences
    tokens: torch.Tensor  # (B, T), the places of their tokens among the N


class BlockRows(NamedTuple):
    """Where rows of one kind of layers are: the block and the row in it, (N,) each."""

    blocks: torch.Tensor
    rows: torch.Tensor


class TableRows(NamedTuple):
    """What attention reads for a group, in all layers of one kind."""

    block_table: torch.Tensor  # (B, M), padded with -1
    lengths: torch.Tensor  # (B,), in slots


class PackedTokens:
    """`counts[i]` new tokens behind the `lengths[i]` of sequence i, whose blocks `tables[kind][i]` names.

    Tensors are made once, outside of inference mode, whose tensors could not be used outside of it.
    """

    def __init__(
        self, lengths: list[int], counts: list[int], tables: dict[str, list[BlockTable]], device: torch.device
    ) -> None:
        self.lengths = lengths
        self.counts = counts
        self.tables = tables
        self.device = device
        self._targets: dict[str, BlockRows] = {}
        self._sources: dict[str, list[TableRows]] = {}

    def __len__(self) -> int:
        return sum(self.counts)

    @cached_property
    @torch.inference_mode(False)
    def positions(self) -> torch.Tensor:
        """The position of each token in its sequence, int64 (1, N)."""
        counts, lengths = torch.tensor([self.counts, self.lengths], device=self.device)
        shifts: torch.Tensor = (lengths - (self.last + 1 - counts)).repeat_interleave(counts)
        return (shifts + torch.arange(len(self), device=self.device)).unsqueeze(0)

    @cached_property
    @torch.inference_mode(False)
    def last(self) -> torch.Tensor:
        """The place of each sequence's last token among the N, int64 (B,)."""
        return torch.tensor(list(accumulate(self.counts)), device=self.device) - 1

    @cached_property
    @torch.inference_mode(False)
    def groups(self) -> list[Group]:
        """The sequences by their number of new tokens."""
        firsts = [0, *accumulate(self.counts)]
        members: dict[int, list[int]] = {}
        for place, count in enumerate(self.counts):
            members.setdefault(count, []).append(place)
        return [
            Group(
                places,
                torch.tensor([[firsts[place]] for place in places], device=self.device)
                + torch.arange(count, device=self.device),
            )
            for count, places in members.items()
        ]

    @torch.inference_mode(False)
    def targets(self, kind: str) -> BlockRows:
        """Return where the new tokens' rows go in the layers of one kind."""
        if kind not in self._targets:
            places = [
                place
                for table, length, count in zip(self.tables[kind], self.lengths, self.counts, strict=True)
                for place in table.places(length, length + count)
            ]
            self._targets[kind] = BlockRows(*torch.tensor(list(zip(*places, strict=True)), device=self.device))
        return self._targets[kind]

    @torch.inference_mode(False)
    def sources(self, kind: str) -> list[TableRows]:
        """Return what attention reads in the layers of one kind, for each group."""
        if kind not in self._sources:
            self._sources[kind] = [self._source(kind, group.members) for group in self.groups]
        return self._sources[kind]

    def packed(self, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return the groups' results (B, H, T, ...) in the order of the tokens, (1, H, N, ...)."""
        return torch.cat([part.transpose(0, 1).flatten(1, 2) for part in parts], dim=1)[:, self._order].unsqueeze(0)

    @cached_property
    @torch.inference_mode(False)
    def _order(self) -> torch.Tensor:
        """Where each of the N tokens is among the groups' tokens, (N,)."""
        return torch.cat([group.tokens.flatten() for group in self.groups]).argsort()

    def _source(self, kind: str, members: list[int]) -> TableRows:
        tables = [self.tables[kind][place] for place in members]
        block_table = torch.full((len(tables), max(len(table.blocks) for table in tables)), -1, device="cpu")
        for row, table in zip(block_table, tables, strict=True):
            row[: len(table.blocks)] = torch.frombuffer(table.blocks, dtype=torch.int64)
        ends = [
            table.slot(self.lengths[place] + self.counts[place]) for place, table in zip(members, tables, strict=True)
        ]
        return TableRows(block_table.to(self.device), torch.tensor(ends, device=self.device))
