"""Summarises a routing trace in a few numbers, for `eaas trace info`."""

from __future__ import annotations

from typing import Any

import numpy as np

from simulator.routing import total_variation
from simulator.traces.trace import Trace

__all__ = ["summary"]


def summary(trace: Trace) -> dict[str, Any]:
    """Compute a trace's figures, as JSON values.

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
