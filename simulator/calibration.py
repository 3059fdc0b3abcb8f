"""How far a trace is from the published figures that its regime was fitted to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eaas.trace import Trace
from eaas.trace.published import published
from simulator.planners import STATIC
from simulator.replay import replay

__all__ = ["deviations"]


def deviations(
    trace: Trace, dataset: str, *, progress: Callable[[float], None] = lambda _part: None
) -> dict[str, Any]:
    """Replays EPLB as the published figures were made, and compares.

    Their EPLB took 1 to 6 s to plan (13 to 70 iterations); ours plans in one. Intervals that do not fit into
    the trace are left out.

    Args:
        trace: Best of 6,144 iterations, 58 layers and 256 experts, as theirs.
        dataset: Of `eaas.trace.published.datasets`.
        progress: Called with the part that is done, 0 to 1.

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
        run = replay(trace, policy, servers=figure.servers, interval=figure.interval or 1)
        rows.append(
            {
                "servers": figure.servers,
                "interval": figure.interval,
                "par": run.par_mean,
                "published_par": figure.par,
                "off": run.par_mean / figure.par - 1,
                "transit": run.transit,
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
