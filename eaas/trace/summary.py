"""A trace in a few numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from eaas.trace.trace import Trace

__all__ = ["summary"]


def summary(trace: Trace) -> dict[str, Any]:
    """JSON values.

    assignments_mean, assignments_min, assignments_max: (token, expert) pairs of a layer in an iteration.
    hottest_mean, hottest_max: load of a layer's hottest expert over its mean, on the average of layers and
    at worst. unused_experts: those without a token, over all layers. change: total-variation distance
    between the loads of the two halves of the trace, averaged over layers (0 the same, 1 nothing in common).
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
        "change": _distance(early_LE, late_LE),
        "notes": dict(trace.notes),
    }


def _distance(one_LE: np.ndarray[Any, Any], other_LE: np.ndarray[Any, Any]) -> float:
    """0.0 where a half has no load."""
    sums = [load.sum(axis=1, keepdims=True) for load in (one_LE, other_LE)]
    if any((total == 0).any() for total in sums):
        return 0.0
    return float(0.5 * np.abs(one_LE / sums[0] - other_LE / sums[1]).sum(axis=1).mean())
