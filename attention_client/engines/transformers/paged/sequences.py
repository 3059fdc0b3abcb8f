"""The sequences of a forward pass, for attention that reads the paged cache through block tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

__all__ = ["Sequences"]


class Sequences(NamedTuple):
    """The sequences of a forward pass and their places in the cache.

    Attributes:
        begins: int32 (S + 1): first token of each sequence in the pass, and the end.
        past: int32 (S): tokens of each sequence in the cache.
        tables: int32 (S, blocks): the blocks of each sequence, for each kind of layers.
    """

    begins: torch.Tensor
    past: torch.Tensor
    tables: tuple[torch.Tensor, ...]

    @classmethod
    def of(
        cls, sizes: Sequence[int], past: Sequence[int], blocks: Sequence[Sequence[list[int]]]
    ) -> Sequences:
        """Describe the sequences of a pass.

        Args:
            sizes: Tokens of each in the pass.
            past: Tokens of each in the cache.
            blocks: Of each sequence, its blocks for each kind of layers.
        """
        begins_S = np.zeros(len(sizes) + 1, np.int32)
        np.cumsum(sizes, out=begins_S[1:])
        tables = []
        for rows in zip(*blocks, strict=True):
            table = np.zeros((len(rows), max(map(len, rows))), np.int32)
            for place, row in enumerate(rows):
                table[place, : len(row)] = row
            tables.append(torch.from_numpy(table))
        return cls(torch.from_numpy(begins_S), torch.tensor(past, dtype=torch.int32), tuple(tables))

    def positions(self) -> torch.Tensor:
        """Return the position of each token in its sequence, int64 (T)."""
        sizes_S = self.begins.diff()
        shift_S = (self.past - self.begins[:-1]).long()
        return torch.arange(int(self.begins[-1])) + shift_S.repeat_interleave(sizes_S)

    def part(self, part: slice) -> Sequences:
        """Return some of the sequences, whose tokens begin at 0."""
        begins = self.begins[part.start : part.stop + 1]
        tables = tuple(table[part] for table in self.tables)
        return Sequences(begins - begins[0], self.past[part], tables)
