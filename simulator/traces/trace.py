"""A routing trace: token counts by iteration, layer and expert, and notes on their origin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from balancer.policies.window import total_variation
from eaas.errors import TraceError

__all__ = ["Counts", "Trace", "check_form", "checked_counts", "refuse_places", "summary"]

Counts = npt.NDArray[np.unsignedinteger[Any]]
_AXES = {"count": ("iteration", "layer", "expert"), "id": ("token", "layer", "choice")}


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


def check_form(values: npt.NDArray[Any], source: object) -> None:
    """Raise TraceError unless an array has numbers, in three dimensions that are not empty."""
    if values.dtype.kind not in "iuf":
        raise TraceError(f"{source}: holds {values.dtype}, give whole numbers")
    if values.ndim != 3 or 0 in values.shape:
        raise TraceError(
            f"{source}: has the shape {values.shape}, give (iterations, layers, experts), "
            "or ids (tokens, layers, top-k)"
        )


def checked_counts(values: npt.NDArray[Any], source: object) -> Counts:
    """Check counts that were read, and convert them to the smallest integer type, for a trace.

    Args:
        values: (I, L, E) of any number type.
        source: The file that the counts come from, for messages.

    Raises:
        TraceError: Not three dimensions, an empty one, or a value that is no count; the message names the
            place.
    """
    check_form(values, source)
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
    kind: Literal["count", "id"] = "count",
) -> None:
    """Raise TraceError for the first wrong place of an array, if there is one.

    Args:
        what: What is wrong with the value, and the remedy.
        kind: What a value is, for the names of the axes.
    """
    if wrong.any():
        place = np.unravel_index(int(wrong.argmax()), wrong.shape)
        where = ", ".join(f"{axis} {i}" for axis, i in zip(_AXES[kind], place, strict=True))
        raise TraceError(f"{source}: the {kind} of {where} is {values[place]}, {what}")


def summary(trace: Trace) -> dict[str, Any]:
    """Compute a trace's figures for `eaas trace info`, as JSON values.

    assignments_mean, assignments_min, assignments_max: (token, expert) pairs of a layer in an iteration.
    hottest_mean, hottest_max: load of a layer's hottest expert over the layer's mean; mean and maximum over
    layers. unused_experts: experts without a token, over all layers. change: total-variation distance of the
    loads in the trace's two halves, mean over layers (0 equal, 1 disjoint).
    """
    counts_ILE = trace.counts_ILE
    layer_IL = counts_ILE.sum(axis=2, dtype=np.int64)
    half = trace.iterations // 2
    early_LE = counts_ILE[:half].sum(axis=0, dtype=np.float64)
    late_LE = counts_ILE[half:].sum(axis=0, dtype=np.float64)
    load_LE = early_LE + late_LE
    hottest_L = load_LE.max(axis=1) / np.maximum(load_LE.mean(axis=1), 1e-300)
    return {
        "iterations": trace.iterations,
        "layers": trace.layers,
        "experts": trace.experts,
        "bytes_in_memory": counts_ILE.nbytes,
        "assignments_mean": float(layer_IL.mean()),
        "assignments_min": int(layer_IL.min()),
        "assignments_max": int(layer_IL.max()),
        "hottest_mean": float(hottest_L.mean()),
        "hottest_max": float(hottest_L.max()),
        "unused_experts": int(np.count_nonzero(load_LE == 0)),
        "change": float(total_variation(early_LE, late_LE).mean()),
        "notes": dict(trace.notes),
    }
