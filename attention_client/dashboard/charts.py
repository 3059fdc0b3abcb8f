"""Pictures of numbers, as text: heatmaps (PNG in a data URI) and curves (SVG). Pure.

A picture is made once for all who look, and costs a few kilobytes however large the cluster is.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from html import escape

import numpy as np
import numpy.typing as npt

__all__ = ["BALANCE", "SHARE", "curve", "heatmap"]

_STEPS = 32
# Half transparent colours look right on light and on dark ground.
_BLUE, _ORANGE, _TEAL = (37, 99, 235), (234, 88, 12), (13, 148, 136)


def _ramp(colour: tuple[int, int, int], begin: float, end: float, steps: int) -> list[bytes]:
    return [bytes((*colour, round(255 * a))) for a in np.linspace(begin, end, steps)]


BALANCE = [
    *_ramp(_BLUE, 0.9, 0.06, _STEPS // 2),
    *_ramp(_ORANGE, 0.06, 1.0, _STEPS // 2),
]
"""From blue (nothing) over nothing at all (the mean) to orange (twice the mean, and above)."""

SHARE = [bytes(4), *_ramp(_TEAL, 0.25, 1.0, _STEPS - 1)]
"""From transparent (none) to solid (all of it)."""


def heatmap(
    values_RC: npt.NDArray[np.float64], palette: Sequence[bytes], label: str, least_px: int = 14
) -> str:
    """An image of one pixel a value, which the browser enlarges.

    Args:
        values_RC: Of 0 to 1, over rows and columns; what is outside is clipped.
        palette: RGBA of equal steps from 0 to 1.
        label: What is to be seen, for who cannot see it.
        least_px: Height of a row while there are few.
    """
    rows = values_RC.shape[0]
    steps = len(palette)
    levels_RC = np.clip(np.ceil(values_RC * (steps - 1)), 0, steps - 1).astype(np.uint8)
    height = max(48, min(420, rows * least_px))
    return (
        f'<img class="map" alt="{escape(label)}" style="height:{height}px" '
        f'src="data:image/png;base64,{base64.b64encode(_png(levels_RC, palette)).decode()}">'
    )


def _png(levels_RC: npt.NDArray[np.uint8], palette: Sequence[bytes]) -> bytes:
    rows, columns = levels_RC.shape
    lines = np.zeros((rows, columns + 1), np.uint8)  # a filter byte, then the row
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


_WIDTH, _HEIGHT = 300, 64
# Few points are not drawn out over the whole width.
_LEAST_POINTS = 60


def curve(
    lines: Sequence[tuple[str, Sequence[float | None]]],
    label: str,
    *,
    least: float = 0.0,
) -> str:
    """Curves over time in one picture, the newest point at the right.

    Args:
        lines: CSS class of each, and its values; None where there is none.
        label: What is to be seen, for who cannot see it.
        least: What the bottom stands for.
    """
    known = [v for _, values in lines for v in values if v is not None]
    top = max([*known, least + 1e-9]) * 1.08
    drawn = []
    points_shown = max(_LEAST_POINTS, *(len(values) for _, values in lines))
    step = _WIDTH / max(1, points_shown - 1)
    for name, values in lines:
        points: list[list[str]] = [[]]
        for i, value in enumerate(values):
            if value is None:
                points.append([])
                continue
            x = _WIDTH - step * (len(values) - 1 - i)
            y = _HEIGHT - (value - least) / (top - least) * _HEIGHT
            points[-1].append(f"{x:.1f},{y:.1f}")
        drawn += [f'<polyline class="{name}" points="{" ".join(p)}"/>' for p in points if p]
    return (
        f'<svg class="curve" role="img" aria-label="{escape(label)}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none">{"".join(drawn)}</svg>'
    )
