"""Replays of other projects' balancers and of ours over the same traces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from balancer.policies import Plan
from balancer.policies.sparse import Layout
from benchmarks.policies.peers import PEERS, PeerPlanner, checkouts
from eaas.errors import ConfigError
from eaas_cli.console import print_table
from simulator.placement.planners import DISPATCH, SPLIT, Planner, make_planner, parse_name
from simulator.placement.replay import replay
from simulator.placement.score import score
from simulator.traces import Trace

__all__ = ["compare_peers", "print_peers"]

_ENDINGS = ("", SPLIT, DISPATCH)
_OURS = ("eplb", "fractional")


class _Repeated:
    """Plans once for several replays that differ only in how clients divide their batches."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._plans: list[Plan] = []
        self._next = 0

    def again(self) -> _Repeated:
        self._next = 0
        return self

    def step(
        self, counts_WLE: npt.NDArray[Any], load_LE: npt.NDArray[np.float64], current: Layout
    ) -> Callable[[], Plan]:
        self._next += 1
        if self._next <= len(self._plans):
            found = self._plans[self._next - 1]
            return lambda: found
        think = self._planner.step(counts_WLE, load_LE, current)

        def plan() -> Plan:
            self._plans.append(think())
            return self._plans[-1]

        return plan


def compare_peers(
    given: Sequence[str],
    traces: dict[str, Trace],
    *,
    policies: Sequence[str] = (),
    servers: int,
    interval: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Replay the peers whose checkouts are given, and policies of ours, over traces.

    Each plan is replayed by its shares, with the best split of each batch (a bound), and as an attention
    client dispatches the batch. Peers deal an expert's tokens evenly to its slots.

    Args:
        given: Checkouts, as NAME=PATH.
        traces: By name.
        policies: Names of ours; empty: `eplb` and `fractional`.
        servers: S; each has as many slots, E / S + 1.

    Returns:
        The JSON document: `rows` with trace, balancer, interval, `par`, `par_split`, `par_dispatch`, transit,
        score (of the shares; 100: our EPLB at this interval), plan_ms.

    Raises:
        ConfigError: An unknown name, a file or module that a checkout lacks, or slots that do not divide.
    """
    paths = checkouts(list(given))
    ours = tuple(policies) or _OURS
    for policy in ours:
        if parse_name(policy)[1]:
            raise ConfigError(
                f"--policy {policy}: give it without an ending, because each is replayed"
            )
    modules = {
        name: peer.load(paths[peer.project])
        for name, peer in PEERS.items()
        if peer.project in paths
    }
    rows = []
    for name, trace in traces.items():
        slots = trace.experts + servers
        first: float | None = None
        for balancer in (*dict.fromkeys(("eplb", *ours)), *modules):
            if balancer in modules:
                planner: Planner | None = PeerPlanner(
                    PEERS[balancer], modules[balancer], servers, slots
                )
            else:
                planner = make_planner(balancer, servers, slots)
            say(f"{name}: {balancer}")
            repeated = None if planner is None else _Repeated(planner)
            runs = [
                replay(
                    trace,
                    balancer + ending,
                    servers=servers,
                    interval=interval,
                    planner=None if repeated is None else repeated.again(),
                )
                for ending in _ENDINGS
            ]
            first = runs[0].time_s if first is None else first
            rows.append(
                {
                    "trace": name,
                    "balancer": balancer,
                    "interval": interval,
                    "par": runs[0].par_mean,
                    "par_split": runs[1].par_mean,
                    "par_dispatch": runs[2].par_mean,
                    "transit": runs[0].transit,
                    "score": score(runs[0].time_s, first),
                    "plan_ms": 1e3 * runs[0].plan_s,
                }
            )
    return {"rows": rows, "checkouts": {name: str(path) for name, path in paths.items()}}


def read_traces(paths: Sequence[Path]) -> dict[str, Trace]:
    """Read traces, named by their files. Raises TraceError."""
    from simulator.traces import read_trace

    return {path.stem: read_trace(path) for path in paths}


def print_peers(document: dict[str, Any]) -> None:
    """Print a row per trace and balancer."""
    print_table(
        ("trace", "balancer", "PAR", "+split", "+dispatch", "transit", "score", "plan ms"),
        [
            (
                row["trace"],
                row["balancer"],
                *(f"{row[key]:.3f}" for key in ("par", "par_split", "par_dispatch")),
                f"{row['transit']:,}",
                f"{row['score']:.1f}",
                f"{row['plan_ms']:.0f}",
            )
            for row in document["rows"]
        ],
    )
    print(
        "PAR by the plan's shares; +split: best split of each batch, a bound; +dispatch: as a client does"
    )
    print("score: of the shares; 100: eplb. plan ms: processor time of a plan, the first included")
