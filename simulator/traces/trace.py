"""A routing trace: token counts by iteration, layer and expert, and notes on their origin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from eaas.errors import TraceError

__all__ = ["Counts", "Trace", "checked_counts", "refuse_places"]

Counts = npt.NDArray[np.unsignedinteger[Any]]
_AXES = {"counts": ("iteration", "layer", "expert"), "ids": ("token", "layer", "choice")}


@dataclass(frozen=True, eq=False)
class Trace:
    """A routing trace: how many tokens each layer's router sent to each expert, by iteration.

    The counts come from `checked_counts` or the generator.

    Attributes:
        counts_ILE: Unsigned integers (I, L, E) of the smallest sufficient type.
        notes: The trace's origin, as plain JSON values.
    """

    counts_ILE: Counts
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def iterations(self) -> int:
        """Number of iterations, forward passes of the model (I)."""
        return int(self.counts_ILE.shape[0])

    @property
    def layers(self) -> int:
        """Number of MoE layers in the trace (L)."""
        return int(self.counts_ILE.shape[1])

    @property
    def experts(self) -> int:
        """Number of logical (routed) experts per MoE layer (E)."""
        return int(self.counts_ILE.shape[2])


def checked_counts(values: npt.NDArray[Any], source: object) -> Counts:
    """Check counts that were read, and convert them to the smallest integer type, for a trace.

    Args:
        values: (I, L, E) of any number type.
        source: The file that the counts come from, for messages.

    Raises:
        TraceError: Not three dimensions, an empty one, or a value that is no count; the message names the
            place.
    """
    if values.dtype.kind not in "iuf":
        raise TraceError(f"{source}: holds {values.dtype}, give whole numbers")
    if values.ndim != 3 or 0 in values.shape:
        raise TraceError(
            f"{source}: has the shape {values.shape}, give (iterations, layers, experts)"
        )
    if values.dtype.kind == "f":
        whole = np.isfinite(values) & (values == np.floor(values))
        refuse_places(values, ~whole, "no whole number: give counts of tokens", source)
    if values.dtype.kind != "u":
        refuse_places(values, values < 0, "negative: give counts of tokens", source)
    peak = int(values.max())
    if peak > np.iinfo(np.uint32).max:
        refuse_places(
            values, values == values.max(), "more than 4 bytes hold: give counts of tokens", source
        )
    return np.ascontiguousarray(values, dtype=np.min_scalar_type(peak))


def refuse_places(
    values: npt.NDArray[Any],
    wrong: npt.NDArray[np.bool_],
    what: str,
    source: object,
    kind: Literal["counts", "ids"] = "counts",
) -> None:
    """Raise TraceError for the first wrong place of an array, if there is one.

    Args:
        what: What is wrong with the value, and the remedy.
        kind: What the values are, for the names of the axes.
    """
    if wrong.any():
        place = np.unravel_index(int(wrong.argmax()), wrong.shape)
        where = ", ".join(f"{axis} {i}" for axis, i in zip(_AXES[kind], place, strict=True))
        noun = "count" if kind == "counts" else "id"
        raise TraceError(f"{source}: the {noun} of {where} is {values[place]}, {what}")
