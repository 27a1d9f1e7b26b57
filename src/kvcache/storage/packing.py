"""How the new tokens of several sequences lie in one row without padding, and where their keys and values go.

sequences   a: 2 new tokens    b: 1     c: 2            N = 5
packed      a0  a1             b0       c0  c1          (1, heads, N, head size)
groups      (a, c) with T = 2, (b) with T = 1           attention takes each group in one call
"""

from array import array
from functools import cached_property
from itertools import accumulate, chain
from typing import NamedTuple

import torch

from kvcache.storage.table import BlockTable


class Group(NamedTuple):
    """Sequences with equally many new tokens."""

    members: list[int]  # their places among the sequences
    num_new: int  # T
    places: slice | torch.Tensor  # of their B * T tokens among the N


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
        self.num_tokens = sum(counts)
        self.tables = tables
        self.device = device
        self._targets: dict[str, BlockRows] = {}
        self._sources: dict[str, list[TableRows]] = {}

    @cached_property
    def firsts(self) -> list[int]:
        """The place of each sequence's first token among the N, and N: B + 1 numbers."""
        return [0, *accumulate(self.counts)]

    @cached_property
    def ends(self) -> list[int]:
        """The length of each sequence with its new tokens."""
        return list(map(int.__add__, self.lengths, self.counts))

    @cached_property
    def plain_positions(self) -> list[int]:
        """The position of each token in its sequence, N numbers."""
        return list(chain.from_iterable(map(range, self.lengths, self.ends)))

    @cached_property
    @torch.inference_mode(False)
    def positions(self) -> torch.Tensor:
        """The position of each token in its sequence, int64 (1, N)."""
        return torch.tensor([self.plain_positions], device=self.device)

    @cached_property
    @torch.inference_mode(False)
    def last(self) -> torch.Tensor:
        """The place of each sequence's last token among the N, int64 (B,)."""
        return torch.tensor(self.firsts[1:], device=self.device) - 1

    @cached_property
    def groups(self) -> list[Group]:
        """The sequences by their number of new tokens."""
        members: dict[int, list[int]] = {}
        for place, count in enumerate(self.counts):
            members.setdefault(count, []).append(place)
        return [Group(places, count, self._places(places, count)) for count, places in members.items()]

    def places(self, kind: str) -> list[tuple[int, int]]:
        """Return the block and the row in it where each new token goes in the layers of one kind."""
        return [
            place
            for table, length, end in zip(self.tables[kind], self.lengths, self.ends, strict=True)
            for place in table.places(length, end)
        ]

    def targets(self, kind: str) -> BlockRows:
        """Return where the new tokens' rows go in the layers of one kind."""
        found = self._targets.get(kind)
        if found is None:
            found = self._targets[kind] = self._find_targets(kind)
        return found

    def sources(self, kind: str) -> list[TableRows]:
        """Return what attention reads in the layers of one kind, for each group."""
        found = self._sources.get(kind)
        if found is None:
            found = self._sources[kind] = [self._find_sources(kind, group.members) for group in self.groups]
        return found

    def unpacked(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return what (1, H, N, D) holds for each group, as (B, H, T, D): views where its tokens stand together."""
        parts = []
        for members, num_new, places in self.groups:
            part = rows if len(self.groups) == 1 else rows[:, :, places]
            if num_new == 1:
                part = part.transpose(0, 2)
            elif len(members) > 1:
                _, heads, _, head_dim = part.shape
                part = part.view(heads, len(members), num_new, head_dim).transpose(0, 1)
            parts.append(part)
        return parts

    def packed(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Return the groups' results (B, H, T, ...) in the order of the tokens, (1, H, N, ...)."""
        rows = []
        for (members, num_new, _), part in zip(self.groups, parts, strict=True):
            if num_new == 1:
                part = part.transpose(0, 2)
            elif len(members) > 1:
                part = part.transpose(0, 1).flatten(1, 2).unsqueeze(0)
            rows.append(part)
        if len(rows) == 1:
            return rows[0]
        joined = torch.cat(rows, dim=2)
        return joined if self._order is None else joined[:, :, self._order]

    @cached_property
    @torch.inference_mode(False)
    def _order(self) -> torch.Tensor | None:
        """Where each of the N tokens is among the groups' tokens, (N,); None where that is the same place."""
        places = [group.places for group in self.groups]
        if all(isinstance(entry, slice) for entry in places):  # the groups are in the order of their first tokens
            return None
        tokens = torch.arange(self.num_tokens, device=self.device)
        return torch.cat([tokens[entry] for entry in places]).argsort()

    @torch.inference_mode(False)
    def _places(self, members: list[int], count: int) -> slice | torch.Tensor:
        firsts = self.firsts
        if members[-1] - members[0] == len(members) - 1:
            return slice(firsts[members[0]], firsts[members[-1] + 1])
        places = torch.tensor([firsts[member] for member in members], device=self.device)
        return (places[:, None] + torch.arange(count, device=self.device)).flatten()

    @torch.inference_mode(False)
    def _find_targets(self, kind: str) -> BlockRows:
        blocks, rows = torch.tensor(list(zip(*self.places(kind), strict=True)), device=self.device)
        return BlockRows(blocks, rows)

    @torch.inference_mode(False)
    def _find_sources(self, kind: str, members: list[int]) -> TableRows:
        tables = [self.tables[kind][member] for member in members]
        width = max(len(table.blocks) for table in tables)
        entries = array("q")
        for table in tables:
            entries.extend(table.blocks)
            entries.extend([-1] * (width - len(table.blocks)))
        block_table = torch.frombuffer(entries, dtype=torch.int64).view(len(tables), width)
        ends = [table.slot(self.ends[member]) for member, table in zip(members, tables, strict=True)]
        return TableRows(block_table.to(self.device), torch.tensor(ends, device=self.device))
