"""Tile sizes that were measured on a device (`eaas bench experts --tune`), kept in the user's cache.

A kernel takes them instead of those of TILES. All tiles of a coding take the same number of inputs in each
step, so they add up in the same order.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from eaas.log import get_logger
from expert_server.kernels.gpu.tiles import TILES, Coding, Tile, Tiles, candidates

__all__ = ["keep_tiles", "tiles_of", "tuned_path"]

_log = get_logger(__name__)


def tuned_path(device: str) -> Path:
    """Return the file of a device; it may not exist.

    Args:
        device: Its name, such as "NVIDIA H100 80GB HBM3".
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "eaas/tiles" / f"{re.sub(r'[^A-Za-z0-9]+', '-', device)}.json"


def tiles_of(device: str, coding: Coding) -> Tiles:
    """Return a device's tiles: the measured ones, or those of TILES. An unusable file is named in the log."""
    tiles = TILES[coding]
    try:
        path = tuned_path(device)
    except RuntimeError:  # No home directory, so that nothing was kept there.
        return tiles
    try:
        found = _read(path).get(coding.name, {})
        return tiles.replaced(_checked(found, coding))
    except FileNotFoundError:
        return tiles
    except (OSError, ValueError) as error:
        _log.warning("%s: tiles are not used (%s): remove it, or measure again", path, error)
        return tiles


def keep_tiles(device: str, measured: Mapping[Coding, Mapping[str, Tile]]) -> Path:
    """Add measured tiles to a device's file, and return it.

    Args:
        device: Its name.
        measured: By coding, tiles by bucket ("few", "many"); some of `candidates`.

    Raises:
        OSError: The file cannot be written.
    """
    path = tuned_path(device)
    try:
        document = _read(path)
    except (FileNotFoundError, ValueError):
        document = {}
    for coding, tiles in measured.items():
        try:
            kept = _checked(document.get(coding.name, {}), coding)
        except ValueError:
            kept = {}
        document[coding.name] = {
            bucket: dataclasses.astuple(tile) for bucket, tile in (kept | dict(tiles)).items()
        }
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(document, indent=1))
    unfinished.replace(path)
    return path


def _read(path: Path) -> dict[str, object]:
    """Read a file. Raises FileNotFoundError, OSError or ValueError."""
    document = json.loads(path.read_text())
    if not isinstance(document, dict):
        raise ValueError("no object")
    return document


def _checked(found: object, coding: Coding) -> dict[str, Tile]:
    """Return the tiles of a coding. Raises ValueError: one is none of the candidates."""
    if not isinstance(found, dict):
        raise ValueError(f"{coding.name}: no object")
    allowed = candidates(coding)
    tiles = {}
    for bucket, numbers in found.items():
        tile = next(
            (t for t in allowed.get(bucket, ()) if [*dataclasses.astuple(t)] == numbers), None
        )
        if tile is None:
            raise ValueError(f"{coding.name}: {bucket} {numbers} is none of the candidates")
        tiles[bucket] = tile
    return tiles
