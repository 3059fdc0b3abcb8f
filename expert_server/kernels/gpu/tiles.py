"""Sizes of kernel `triton`'s tiles, and how a matrix is coded; no device is needed to read this."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

__all__ = ["INNER", "SUM_COLUMNS", "SUM_TOKENS", "TILES", "Coding", "Tile", "Tiles"]

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

    def choose(self, rows: int, experts: int) -> Tile:
        """Choose by the mean rows per expert, which needs no look at the device."""
        return self.many if rows >= _MANY_ROWS * max(1, experts) else self.few


# Chosen by what compilers make of them: no spills for any architecture. Their speed is unknown.
TILES = {
    Coding.BFLOAT16: Tiles(64, Tile(16, 64, 4, 4), Tile(64, 64, 4, 3)),
    Coding.FLOAT32: Tiles(16, Tile(16, 64, 8, 4), Tile(64, 64, 8, 3)),
    Coding.FP8: Tiles(32, Tile(16, 64, 4, 4), Tile(64, 64, 8, 3)),
    Coding.MXFP4: Tiles(64, Tile(16, 64, 4, 4), Tile(64, 64, 8, 3)),
}
