"""Reads a routing trace from CSV, whose header distinguishes two forms:

    iteration,layer,0,1,...,E-1        wide: a row for each iteration and layer
    iteration,layer,expert,count       long: cells without a row are 0

Numbers start at 0. Each iteration and layer needs a row: a missing one is an error, not a zero.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from eaas.errors import TraceError
from simulator.traces.arrays import MOST_EXPERTS
from simulator.traces.trace import Trace, checked_counts

__all__ = ["read_csv"]

_LONG = ["iteration", "layer", "expert", "count"]


def read_csv(path: Path) -> Trace:
    """Read a trace from a CSV. Raises TraceError for holes, repeats and what is no count."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            header = [word.strip() for word in file.readline().rstrip("\n").split(",")]
            if header[:2] != ["iteration", "layer"] or len(header) < 3:
                raise TraceError(
                    f"{path}: the header is not iteration,layer,0,1,... or {','.join(_LONG)}"
                )
            lines = file.readlines()
        if not any(map(str.strip, lines)):
            raise TraceError(f"{path}: has a header and no rows: give a row for each layer")
        rows = np.loadtxt(lines, delimiter=",", dtype=np.int64, ndmin=2)
    except ValueError as error:
        raise TraceError(f"{path}: {error}: give whole numbers, and none left out") from error
    if rows.size == 0 or rows.shape[1] != len(header):
        raise TraceError(f"{path}: has rows of {rows.shape[1]} numbers, the header {len(header)}")
    counts = _from_long(rows, path) if header == _LONG else _from_wide(rows, path)
    return Trace(checked_counts(counts, path), {"source": path.name})


def _from_wide(rows: npt.NDArray[np.int64], path: Path) -> npt.NDArray[np.int64]:
    iterations, layers = _extent(rows[:, :2], path)
    counts = np.zeros((iterations * layers, rows.shape[1] - 2), np.int64)
    place = rows[:, 0] * layers + rows[:, 1]
    _check_rows(place, layers, path)
    counts[place] = rows[:, 2:]
    return counts.reshape(iterations, layers, -1)


def _from_long(rows: npt.NDArray[np.int64], path: Path) -> npt.NDArray[np.int64]:
    iterations, layers, experts = _extent(rows[:, :3], path)
    if experts > MOST_EXPERTS:
        raise TraceError(
            f"{path}: expert {experts - 1}: numbers above {MOST_EXPERTS - 1} are taken for a mistake"
        )
    seen_IL = np.zeros((iterations, layers), np.bool_)
    seen_IL[rows[:, 0], rows[:, 1]] = True
    _check_holes(seen_IL, path)
    counts = np.zeros(iterations * layers * experts, np.int64)
    place = (rows[:, 0] * layers + rows[:, 1]) * experts + rows[:, 2]
    first, repeats = np.unique(place, return_counts=True)
    if (repeats > 1).any():
        layer_place, expert = divmod(int(first[repeats.argmax()]), experts)
        iteration, layer = divmod(layer_place, layers)
        raise TraceError(
            f"{path}: iteration {iteration}, layer {layer}, expert {expert} is there twice: "
            "give each once"
        )
    counts[place] = rows[:, 3]
    return counts.reshape(iterations, layers, experts)


def _extent(places: npt.NDArray[np.int64], path: Path) -> list[int]:
    """Return the sizes of a CSV's axes: one more than the highest number in each column."""
    if places.min() < 0:
        raise TraceError(f"{path}: {int(places.min())} is no number of a row: count from 0")
    extent = [int(most) + 1 for most in places.max(axis=0)]
    # The size must match the number of rows, so that one wrong row cannot allocate all memory.
    if np.prod([float(size) for size in extent[:2]]) > len(places):
        raise TraceError(
            f"{path}: {len(places)} rows for {extent[0]} iterations of {extent[1]} layers: "
            "some are missing: give a row for each"
        )
    return extent


def _check_rows(place: npt.NDArray[np.int64], layers: int, path: Path) -> None:
    """Raise TraceError unless each (iteration, layer) has exactly one row."""
    rows_P = np.bincount(place)
    if (rows_P > 1).any():
        iteration, layer = divmod(int((rows_P > 1).argmax()), layers)
        raise TraceError(
            f"{path}: iteration {iteration}, layer {layer} is there twice: give each once"
        )
    _check_holes((rows_P > 0).reshape(-1, layers), path)


def _check_holes(seen_IL: npt.NDArray[np.bool_], path: Path) -> None:
    if not seen_IL.all():
        iteration, layer = divmod(int((~seen_IL).argmax()), seen_IL.shape[1])
        raise TraceError(f"{path}: iteration {iteration}, layer {layer} has no row: give each")
