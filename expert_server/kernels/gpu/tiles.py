"""Sizes of kernel `triton`'s tiles, and how a matrix is coded; no device is needed to read this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

__all__ = [
    "INNER",
    "SUM_COLUMNS",
    "SUM_TOKENS",
    "TILES",
    "Coding",
    "Tile",
    "Tiles",
    "candidates",
    "is_many",
]

# The rows of matrices and hidden states are padded to a multiple of so many inputs.
INNER = 64
# Tokens and columns of a program of the sum.
SUM_TOKENS, SUM_COLUMNS = 4, 256
# Mean rows per expert from which on tiles are large.
_MANY_ROWS = 32


class Coding(IntEnum):
    """What a matrix consists of; the numbers are shared with the device code."""

    BFLOAT16 = 0
    FLOAT32 = 1
    FP8 = 2  # e4m3, one float32 scale per channel and group of inputs
    MXFP4 = 3  # e2m1, one e8m0 scale per channel and 32 inputs


@dataclass(frozen=True)
class Tile:
    """A program's share of a product, and its resources.

    Attributes:
        rows: Rows of one expert.
        columns: Output channels.
        warps: Warps of 32 threads.
        stages: Steps whose loads are under way at once.
    """

    rows: int
    columns: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tiles:
    """The tiles of one coding.

    Attributes:
        step: Inputs that are multiplied at once; divides INNER. The same for both tiles, so that sums have
            one order.
        few: For few rows per expert, as in decode.
        many: For many, as in prefill.
    """

    step: int
    few: Tile
    many: Tile

    @property
    def buckets(self) -> dict[str, Tile]:
        """Both tiles by name."""
        return {"few": self.few, "many": self.many}

    def replaced(self, buckets: Mapping[str, Tile]) -> Tiles:
        """Return the same with other tiles, by name; `step` stays."""
        return Tiles(self.step, buckets.get("few", self.few), buckets.get("many", self.many))

    def choose(self, rows: int, experts: int) -> Tile:
        """Choose by the mean rows per expert, which needs no look at the device."""
        return self.many if is_many(rows, experts) else self.few


def is_many(rows: int, experts: int) -> bool:
    """Whether a batch of so many rows for so many experts of the table takes the large tile."""
    return rows >= _MANY_ROWS * max(1, experts)


# Chosen by what compilers make of them: no spills for any architecture. On an H200 they take at most 6 %
# longer than the fastest of `candidates`; `tuned.py` has what was measured on a device.
TILES = {
    Coding.BFLOAT16: Tiles(64, Tile(16, 64, 4, 4), Tile(64, 64, 4, 3)),
    Coding.FLOAT32: Tiles(16, Tile(16, 64, 8, 4), Tile(64, 64, 8, 3)),
    Coding.FP8: Tiles(32, Tile(16, 64, 4, 4), Tile(64, 64, 8, 3)),
    Coding.MXFP4: Tiles(64, Tile(16, 64, 4, 4), Tile(128, 64, 8, 3)),
}


def candidates(coding: Coding) -> dict[str, tuple[Tile, ...]]:
    """Return the tiles to measure for few and for many rows per expert, that of TILES first.

    None of them spills. Tiles of 128 x 128 all do, so the list leaves them out.
    """
    tiles = TILES[coding]
    if coding is Coding.FLOAT32:
        return {bucket: (tile,) for bucket, tile in tiles.buckets.items()}
    few = (Tile(16, columns, warps, 4) for columns in (32, 64, 128) for warps in (4, 8))
    many = (Tile(*sides, 8, 3) for sides in ((32, 64), (32, 128), (64, 64), (64, 128), (128, 64)))
    return {
        "few": tuple(dict.fromkeys((tiles.few, *few))),
        "many": tuple(dict.fromkeys((tiles.many, *many))),
    }
