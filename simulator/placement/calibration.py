"""Measures a routing trace's deviation from the published figures that its regime was fitted to.

The published transit counts slots, where replays count loaded replicas. A slot table has the expert in each
slot of each server. DeepSeek's EPLB lists a server's experts anew in each plan, heaviest replica first. Each
slot whose expert changes counts, even if the expert only moves to another slot of its server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.placement.planners import STATIC
from simulator.placement.replay import replay
from simulator.placement.sparing import Serving
from simulator.placement.timeline import ITERATION_S
from simulator.traces import Trace
from simulator.traces.published import published

__all__ = ["deviations", "first_table", "packed_table"]

Table = npt.NDArray[np.int64]
Holds = npt.NDArray[np.bool_]

_EMPTY = -1


def deviations(
    trace: Trace, dataset: str, *, progress: Callable[[float], None] = lambda _part: None
) -> dict[str, Any]:
    """Replay EPLB on a trace as for the published figures, and compare the results.

    In the published measurements EPLB took 1 to 6 s to plan (13 to 70 iterations); here it plans in one
    iteration. Transit counts slots, as in the published figures. Intervals that do not fit into the trace are
    left out.

    Args:
        trace: Ideally of 6,144 iterations, 58 layers and 256 experts, as the published one.
        dataset: See `simulator.traces.published`.
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
        slots = trace.experts + figure.servers
        tables = _SlotTables(figure.servers, slots)
        run = replay(
            trace,
            STATIC if figure.interval is None else "eplb",
            servers=figure.servers,
            interval=figure.interval or 1,
            slots=slots,
            planning_s=ITERATION_S,
            served=tables.add,
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


class _SlotTables:
    """The slot tables of all layers during a replay, with the slots changed so far."""

    def __init__(self, servers: int, slots: int) -> None:
        self._slots_S = slots // servers + (np.arange(servers) < slots % servers)
        self._tables: dict[int, Table] = {}
        self.changed = 0

    def add(self, serving: Serving) -> None:
        """Add the placement that follows in a layer, and its changed slots to `changed`."""
        holds_SE = serving.layout.dense()[0][0]
        if serving.load_E is None:
            self._tables[serving.layer] = first_table(holds_SE, self._slots_S)
            return
        old_SR = self._tables[serving.layer]
        new_SR = packed_table(holds_SE, serving.load_E, old_SR.shape[1])
        self._tables[serving.layer] = new_SR
        self.changed += int(np.count_nonzero((old_SR != new_SR) & (new_SR != _EMPTY)))


def first_table(holds_SE: Holds, slots_S: npt.NDArray[np.int64]) -> Table:
    """int64 (S, R), R the most slots: each server's experts by id, padded with the last one; -1: no slot."""
    width = int(slots_S.max())
    table_SR = packed_table(holds_SE, np.zeros(holds_SE.shape[1]), width)
    is_free_SR = (table_SR == _EMPTY) & (np.arange(width) < slots_S[:, None])
    return np.where(is_free_SR, table_SR.max(axis=1, keepdims=True), table_SR)


def packed_table(holds_SE: Holds, load_E: npt.NDArray[np.float64], width: int) -> Table:
    """int64 (S, width): each server's experts, highest load per replica first; -1 in slots left over.

    Args:
        holds_SE: bool (S, E).
        load_E: The planned load; of equal ones the lower id comes first.
        width: R.
    """
    each_E = load_E / np.maximum(holds_SE.sum(axis=0), 1)
    order_E = np.argsort(-each_E, kind="stable")
    server_N, place_N = np.nonzero(holds_SE[:, order_E])
    held_S = holds_SE.sum(axis=1)
    first_S = np.cumsum(held_S) - held_S
    table_SR = np.full((len(holds_SE), width), _EMPTY, np.int64)
    table_SR[server_N, np.arange(len(server_N)) - first_S[server_N]] = order_E[place_N]
    return table_SR
