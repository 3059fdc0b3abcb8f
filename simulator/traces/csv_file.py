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
    counts = _counts(rows, 3 if header == _LONG else 2, path)
    return Trace(checked_counts(counts, path), {"source": path.name})


def _counts(rows: npt.NDArray[np.int64], axes: int, path: Path) -> npt.NDArray[np.int64]:
    """(I, L, E): the counts of rows that begin with the numbers of their place along some axes."""
    extent = _extent(rows[:, :axes], path)
    place = np.ravel_multi_index(tuple(rows[:, :axes].T), extent)
    first, repeats = np.unique(place, return_counts=True)
    if (repeats > 1).any():
        numbers = np.unravel_index(first[repeats.argmax()], extent)
        where = ", ".join(f"{axis} {n}" for axis, n in zip(_LONG[:axes], numbers, strict=True))
        raise TraceError(f"{path}: {where} is there twice: give each once")
    seen_IL = np.zeros(extent[:2], np.bool_)
    seen_IL[rows[:, 0], rows[:, 1]] = True
    if not seen_IL.all():
        iteration, layer = divmod(int((~seen_IL).argmax()), extent[1])
        raise TraceError(f"{path}: iteration {iteration}, layer {layer} has no row: give each")
    counts = np.zeros((np.prod(extent), rows.shape[1] - axes), np.int64)
    counts[place] = rows[:, axes:]
    return counts.reshape(*extent[:2], -1)


def _extent(places: npt.NDArray[np.int64], path: Path) -> tuple[int, ...]:
    """Return the sizes of a CSV's axes: one more than the highest number in each column."""
    if places.min() < 0:
        raise TraceError(f"{path}: {int(places.min())} is no number of a row: count from 0")
    extent = tuple(int(most) + 1 for most in places.max(axis=0))
    # The size must match the number of rows, so that one wrong row cannot allocate all memory.
    if np.prod([float(size) for size in extent[:2]]) > len(places):
        raise TraceError(
            f"{path}: {len(places)} rows for {extent[0]} iterations of {extent[1]} layers: "
            "some are missing: give a row for each"
        )
    if len(extent) == 3 and extent[2] > MOST_EXPERTS:
        raise TraceError(
            f"{path}: expert {extent[2] - 1}: numbers above {MOST_EXPERTS - 1} are taken for a mistake"
        )
    return extent
