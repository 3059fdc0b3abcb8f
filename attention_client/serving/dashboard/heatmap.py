"""Heatmaps: a PNG in a data URI. Pure.

All viewers share a picture; it has a few kilobytes for any size of cluster.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from attention_client.serving.dashboard.nodes import Node, h

__all__ = ["BALANCE", "SHARE", "heatmap"]

_STEPS = 32
# Transparent colours suit a light and a dark background.
_BLUE, _ORANGE, _TEAL = (37, 99, 235), (234, 88, 12), (13, 148, 136)


def _ramp(colour: tuple[int, int, int], begin: float, end: float, steps: int) -> list[bytes]:
    return [bytes((*colour, round(255 * a))) for a in np.linspace(begin, end, steps)]


BALANCE = [
    *_ramp(_BLUE, 0.9, 0.06, _STEPS // 2),
    *_ramp(_ORANGE, 0.06, 1.0, _STEPS // 2),
]
"""From blue (no load) through transparent (the mean) to orange (twice the mean or more)."""

SHARE = [bytes(4), *_ramp(_TEAL, 0.25, 1.0, _STEPS - 1)]
"""From transparent (no share) to solid (the whole share)."""


def heatmap(
    values_RC: npt.NDArray[np.float64], palette: Sequence[bytes], label: str, least_px: int = 14
) -> Node:
    """Draw an image with one pixel for each value; the browser enlarges it.

    Args:
        values_RC: Values 0 to 1 by row and column; others are clipped.
        palette: RGBA colours in equal steps from 0 to 1.
        label: Text for screen readers.
        least_px: Height of a row if there are few rows.
    """
    rows = values_RC.shape[0]
    steps = len(palette)
    levels_RC = np.clip(np.ceil(values_RC * (steps - 1)), 0, steps - 1).astype(np.uint8)
    height = max(48, min(420, rows * least_px))
    picture = base64.b64encode(_png(levels_RC, palette)).decode()
    source = f"data:image/png;base64,{picture}"
    return h("img", class_="map", alt=label, height=height, src=source)


def _png(levels_RC: npt.NDArray[np.uint8], palette: Sequence[bytes]) -> bytes:
    rows, columns = levels_RC.shape
    lines = np.zeros((rows, columns + 1), np.uint8)  # each row begins with a filter byte
    lines[:, 1:] = levels_RC
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)),
        (b"PLTE", b"".join(colour[:3] for colour in palette)),
        (b"tRNS", b"".join(colour[3:] for colour in palette)),
        (b"IDAT", zlib.compress(lines.tobytes(), 1)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
