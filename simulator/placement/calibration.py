"""Measures a routing trace's deviation from the published figures that its regime was fitted to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simulator.placement.planners import STATIC, first_layout
from simulator.placement.replay import replay
from simulator.placement.slots import SlotTables
from simulator.placement.timeline import ITERATION_S
from simulator.traces import Trace
from simulator.traces.published import published

__all__ = ["deviations"]


def deviations(
    trace: Trace, dataset: str, *, progress: Callable[[float], None] = lambda _part: None
) -> dict[str, Any]:
    """Replay EPLB on a trace as for the published figures, and compare the results.

    In the published measurements EPLB took 1 to 6 s to plan (13 to 70 iterations); here it plans in one
    iteration. Transit counts slots, as in the published figures. Intervals that do not fit into the trace are
    left out.

    Args:
        trace: Ideally of 6,144 iterations, 58 layers and 256 experts, as the published one.
        dataset: One of `simulator.traces.published.datasets`.
        progress: Called with the part done, 0 to 1.

    Returns:
        JSON values: {"dataset", "rows": [{"servers", "interval", "par", "published_par", "off", "transit",
        "published_transit"}], "mean_off", "worst_off"}; off is par / published_par - 1, the last two are of
        its absolute value.

    Raises:
        ConfigError: An unknown dataset.
    """
    figures = [
        figure
        for figure in published(dataset)
        if figure.interval is None or figure.interval < trace.iterations
    ]
    rows = []
    for number, figure in enumerate(figures):
        policy = STATIC if figure.interval is None else "eplb"
        slots = trace.experts + figure.servers
        tables = SlotTables(
            first_layout(trace.layers, figure.servers, trace.experts).holds_LSE, slots
        )
        run = replay(
            trace,
            policy,
            servers=figure.servers,
            interval=figure.interval or 1,
            slots=slots,
            planning_s=ITERATION_S,
            redeployed=tables.redeploy,
        )
        rows.append(
            {
                "servers": figure.servers,
                "interval": figure.interval,
                "par": run.par_mean,
                "published_par": figure.par,
                "off": run.par_mean / figure.par - 1,
                "transit": tables.changed,
                "published_transit": figure.transit,
            }
        )
        progress((number + 1) / len(figures))
    off = [abs(float(row["off"] or 0.0)) for row in rows]
    return {
        "dataset": dataset,
        "rows": rows,
        "mean_off": sum(off) / len(off),
        "worst_off": max(off),
    }
