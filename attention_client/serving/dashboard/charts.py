"""Heatmaps (PNG in a data URI) and line charts (SVG) of the dashboard. Pure.

All viewers share a picture, which has a few kilobytes for any size of cluster.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attention_client.serving.dashboard.nodes import Node, h
from attention_client.serving.dashboard.tables import ago

__all__ = ["BALANCE", "SHARE", "Line", "chart", "heatmap"]

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


_WIDTH, _HEIGHT = 300, 90
# The time axis has at least this length.
_LEAST_S = 60.0
_LEAST_RANGE = 0.1
_STEPS_OF_TEN = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True)
class Line:
    """One curve of a chart.

    Attributes:
        kind: CSS class.
        name: Name in the legend.
        values: One for each of the chart's ages; None: unknown.
    """

    kind: str
    name: str
    values: Sequence[float | None]


def chart(
    title: str,
    now: str,
    ages_s: Sequence[float],
    lines: Sequence[Line],
    *,
    least: float = 0.0,
    unit: str = "",
) -> Node:
    """Draw curves over time with scales and a legend. The newest point is at the right.

    Args:
        title: Title of the chart.
        now: The newest value as text.
        ages_s: Age of each value in seconds, oldest first.
        lines: The curves.
        least: Start of the scale.
        unit: Unit of the values.
    """
    known = [v for line in lines for v in line.values if v is not None and math.isfinite(v)]
    ticks = _ticks(least, max(known, default=least))
    span_s = max(_LEAST_S, *ages_s) if ages_s else _LEAST_S
    drawn = [
        h("polyline", class_=line.kind, points=" ".join(points))
        for line in lines
        for points in _runs(line.values, ages_s, span_s, ticks[0], ticks[-1])
    ]
    grid = [
        h("line", class_="grid", x1=0, x2=_WIDTH, y1=f"{y:.1f}", y2=f"{y:.1f}")
        for y in np.linspace(0, _HEIGHT, len(ticks))
    ]
    box = f"0 0 {_WIDTH} {_HEIGHT}"
    scale = [f"{tick:g} {unit}".strip() for tick in ticks]
    label = f"{title} over the last {span_s:.0f} s, {ticks[0]:g} to {scale[-1]}. Now: {now}."
    return h(
        "figure",
        h("figcaption", f"{title}: ", h("strong", now)),
        h(
            "div",
            h("div", *(h("span", tick) for tick in reversed(scale)), class_="scale"),
            h("svg", *grid, *drawn, viewBox=box, preserveAspectRatio="none", class_="curve"),
            h("div", h("span", ago(span_s)), h("span", "now"), class_="times"),
            class_="plot",
            role="img",
            aria_label=label,
        ),
        h(
            "p",
            *(h("span", h("span", class_=f"line {line.kind}"), line.name) for line in lines),
            class_="lines",
        ),
    )


def _ticks(least: float, most: float) -> list[float]:
    """Return three round numbers for a chart's scale: the first is `least`, the last is at least `most`."""
    step = max(most - least, _LEAST_RANGE) / 2
    ten = 10.0 ** math.floor(math.log10(step))
    # The tolerance absorbs rounding errors: 2 covers 2.0000000001.
    step = ten * next((s for s in _STEPS_OF_TEN if s * ten >= step * (1 - 1e-9)), 10.0)
    return [round(least + i * step, 9) for i in range(3)]


def _runs(
    values: Sequence[float | None],
    ages_s: Sequence[float],
    span_s: float,
    least: float,
    top: float,
) -> Iterator[list[str]]:
    """Yield the points of each part of a curve between unknown values."""
    run: list[str] = []
    for value, age_s in zip(values, ages_s, strict=True):
        if value is None or not math.isfinite(value):
            if run:
                yield run
            run = []
            continue
        x = _WIDTH * (1 - age_s / span_s)
        y = _HEIGHT * (1 - (value - least) / (top - least))
        run.append(f"{x:.1f},{y:.1f}")
    if run:
        yield run
