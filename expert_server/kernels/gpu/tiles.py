"""Sizes of kernel `triton`'s tiles, and how a matrix is coded; no device is needed to read this.

Sizes that were measured on a device (`eaas bench experts --tune`) are in the user's cache; a kernel takes
them instead of those of TILES. All tiles of a coding take the same number of inputs in each step, so they add
up in the same order.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from eaas.log import get_logger

__all__ = [
    "INNER",
    "STEPS",
    "SUM_COLUMNS",
    "SUM_TOKENS",
    "TILES",
    "Coding",
    "Tile",
    "bucket_of",
    "candidates",
    "keep_tiles",
    "tiles_of",
    "tuned_path",
]

_log = get_logger(__name__)

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


class Tile(NamedTuple):
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


# Inputs that are multiplied at once; divide INNER.
STEPS = {Coding.BFLOAT16: 64, Coding.FLOAT32: 16, Coding.FP8: 32, Coding.MXFP4: 64}

# By bucket: for few rows per expert, as in decode, and for many, as in prefill. Chosen by what compilers make
# of them: no spills for any architecture. On an H200 they take at most 6 % longer than the fastest of
# `candidates`.
TILES = {
    Coding.BFLOAT16: {"few": Tile(16, 64, 4, 4), "many": Tile(64, 64, 4, 3)},
    Coding.FLOAT32: {"few": Tile(16, 64, 8, 4), "many": Tile(64, 64, 8, 3)},
    Coding.FP8: {"few": Tile(16, 64, 4, 4), "many": Tile(64, 64, 8, 3)},
    Coding.MXFP4: {"few": Tile(16, 64, 4, 4), "many": Tile(128, 64, 8, 3)},
}


def bucket_of(rows: int, experts: int) -> str:
    """Return the bucket of a batch of so many rows for so many experts of the table.

    By the mean rows per expert, which needs no look at the device.
    """
    return "many" if rows >= _MANY_ROWS * max(1, experts) else "few"


def candidates(coding: Coding) -> dict[str, tuple[Tile, ...]]:
    """Return the tiles to measure by bucket, that of TILES first.

    None of them spills. Tiles of 128 x 128 all do, so the list leaves them out.
    """
    tiles = TILES[coding]
    if coding is Coding.FLOAT32:
        return {bucket: (tile,) for bucket, tile in tiles.items()}
    few = (Tile(16, columns, warps, 4) for columns in (32, 64, 128) for warps in (4, 8))
    many = (Tile(*sides, 8, 3) for sides in ((32, 64), (32, 128), (64, 64), (64, 128), (128, 64)))
    return {
        "few": tuple(dict.fromkeys((tiles["few"], *few))),
        "many": tuple(dict.fromkeys((tiles["many"], *many))),
    }


def tuned_path(device: str) -> Path:
    """Return the file of a device's measured tiles; it may not exist.

    Args:
        device: Its name, such as "NVIDIA H100 80GB HBM3".
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "eaas/tiles" / f"{re.sub(r'[^A-Za-z0-9]+', '-', device)}.json"


def tiles_of(device: str, coding: Coding) -> Mapping[str, Tile]:
    """Return a device's tiles by bucket: the measured ones, or those of TILES.

    An unusable file is named in the log.
    """
    tiles = TILES[coding]
    try:
        path = tuned_path(device)
    except RuntimeError:  # No home directory, so that nothing was kept there.
        return tiles
    try:
        return tiles | _checked(_read(path), coding)
    except FileNotFoundError:
        return tiles
    except (OSError, ValueError) as error:
        _log.warning("%s: tiles are not used (%s): remove it, or measure again", path, error)
        return tiles


def keep_tiles(device: str, coding: Coding, measured: Mapping[str, Tile]) -> Path:
    """Add measured tiles to a device's file, and return it. What is unusable in the file goes.

    Args:
        device: Its name.
        coding: What was measured.
        measured: Tiles by bucket; some of `candidates`.

    Raises:
        OSError: The file cannot be written.
    """
    path = tuned_path(device)
    document: dict[str, Any] = {}
    kept: dict[str, Tile] = {}
    with contextlib.suppress(FileNotFoundError, ValueError):
        document = _read(path)
        kept = _checked(document, coding)
    document[coding.name] = {**kept, **measured}
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(document, indent=1))
    unfinished.replace(path)
    return path


def _read(path: Path) -> dict[str, Any]:
    """Read a file. Raises FileNotFoundError, OSError or ValueError."""
    document = json.loads(path.read_text())
    if not isinstance(document, dict):
        raise ValueError("no object")
    return document


def _checked(document: Mapping[str, Any], coding: Coding) -> dict[str, Tile]:
    """Return the tiles of a coding. Raises ValueError: one is none of the candidates."""
    found, allowed = document.get(coding.name, {}), candidates(coding)
    if not isinstance(found, dict):
        raise ValueError(f"{coding.name}: no object")
    for bucket, numbers in found.items():
        if numbers not in [[*tile] for tile in allowed.get(bucket, ())]:
            raise ValueError(f"{coding.name}: {bucket} {numbers} is none of the candidates")
    return {bucket: Tile(*numbers) for bucket, numbers in found.items()}
