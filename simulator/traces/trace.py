"""A routing trace: token counts by iteration, layer and expert, and notes on their origin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from eaas.errors import TraceError
from simulator.routing import are_token_ids

__all__ = ["Counts", "Trace", "checked_counts"]

Counts = npt.NDArray[np.unsignedinteger[Any]]
_AXES = ("iteration", "layer", "expert")


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


def checked_counts(values: npt.NDArray[Any], source: object, *, known: bool = False) -> Counts:
    """Check counts that were read, and convert them to the smallest integer type, for a trace.

    Args:
        values: (I, L, E) of any number type.
        source: The file that the counts come from, for messages.
        known: Whether the source defines the last axis as experts; otherwise values that look like the ids of
            tokens' experts are refused.

    Raises:
        TraceError: Not three dimensions, an empty one, a value that is no count, or ids; the message names
            the place.
    """
    if values.dtype.kind not in "iuf":
        raise TraceError(f"{source}: holds {values.dtype}, give whole numbers")
    if values.ndim != 3 or 0 in values.shape:
        raise TraceError(
            f"{source}: has the shape {values.shape}, give (iterations, layers, experts)"
        )
    if values.dtype.kind == "f":
        whole = np.isfinite(values) & (values == np.floor(values))
        _refuse(values, ~whole, "no whole number", source)
    if values.dtype.kind != "u":
        _refuse(values, values < 0, "negative", source)
    if not known and are_token_ids(values):
        first, layers, last = values.shape
        raise TraceError(
            f"{source}: the shape {values.shape} reads as {first} iterations of {layers} layers with {last} "
            f"experts, but the values look like the ids of {last} experts for each of {first} tokens: turn "
            "ids into counts with `eaas trace info FILE --experts E --out TRACE`, give counts as .csv"
        )
    peak = int(values.max())
    if peak > np.iinfo(np.uint32).max:
        _refuse(values, values == values.max(), "more than 4 bytes hold", source)
    return np.ascontiguousarray(values, dtype=np.min_scalar_type(peak))


def _refuse(
    values: npt.NDArray[Any], wrong: npt.NDArray[np.bool_], what: str, source: object
) -> None:
    """Raise TraceError for the first wrong place of an array, if there is one."""
    if wrong.any():
        place = np.unravel_index(int(wrong.argmax()), wrong.shape)
        where = ", ".join(f"{axis} {i}" for axis, i in zip(_AXES, place, strict=True))
        raise TraceError(
            f"{source}: the count of {where} is {values[place]}, {what}: give counts of tokens"
        )
