"""`eaas bench monitor`: the whole run, and its document."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from typing import Any

import grpc

from eaas.bench.dispatch.turns import figure
from eaas.bench.machine import busy_core_seconds, processor
from eaas.bench.monitor.core import bench_registry
from eaas.bench.monitor.plan import Plan
from eaas.bench.monitor.stage import Stage, stage
from eaas.config import MonitorConfig
from eaas.cores import usable_cores
from eaas.errors import ClusterError

__all__ = ["bench_monitor", "find_break", "is_broken", "watching_step"]

# What still counts as "in time".
_TAKEN, _ANSWER_MS = 0.99, 500.0
# The first that knows of a death does so within the lease and the gap between two looks.
_DEATH_S = 30.0


def bench_monitor(plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure a monitor with more and more members. Processes are gone afterwards.

    Args:
        plan: What to measure.
        say: Progress, for people.

    Returns:
        The document of `eaas bench monitor --json` (drawn in this package's docstring).

    Raises:
        EaasError: A process did not start, or one of members ended.
    """
    began, busy_s = time.monotonic(), busy_core_seconds()
    say("the registry alone")
    registry = [bench_registry(members) for members in plan.members]
    rows: list[dict[str, Any]] = []
    for members in plan.members:
        rows.append(_row(plan, members, say))
        if not rows[-1]["watching"]:
            break
    return {
        "machine": {
            "processor": processor(),
            "cores": usable_cores(),
            "python": platform.python_version(),
            "grpc": grpc.__version__,
            # With those of this benchmark.
            "busy_cores": figure((busy_core_seconds() - busy_s) / (time.monotonic() - began)),
        },
        "settings": {
            "interval_s": plan.interval_s,
            "lease_s": MonitorConfig().lease_s,
            "per_connection": plan.per_connection,
            "loaders": plan.loaders,
            "seconds": plan.seconds,
            "deaths": plan.deaths,
        },
        "registry": registry,
        "rows": rows,
        "breaks": find_break(rows),
    }


def _row(plan: Plan, members: int, say: Callable[[str], None]) -> dict[str, Any]:
    """One step; without `watching` where members could not even join."""
    row: dict[str, Any] = {"members": members, "watching": []}
    with stage(plan, members) as here:
        say(f"{members} members join")
        try:
            row["join_s"] = figure(max(here.ask("join")))
        except ClusterError as error:
            return row | {"error": str(error)}
        say(f"{members} members, nobody watches")
        row["heartbeats"] = here.measure()
        snapshot, took_s = here.snapshot()
        row["snapshot"] = {"bytes": snapshot.ByteSize(), "ms": figure(1e3 * took_s)}
        for watchers in plan.watcher_steps(members):
            say(f"{members} members, {watchers} watch")
            row["watching"].append(watching_step(plan, here, watchers))
            if is_broken(row["watching"][-1]):
                say(
                    "the monitor is behind, or has ended streams: what comes next would be without them"
                )
                break
        row["falsely_dead"] = here.dead()
    return row


def watching_step(plan: Plan, here: Stage, watchers: int) -> dict[str, Any]:
    """The monitor while so many members watch, and how soon they know of an end."""
    here.watch(watchers)
    found = {"watchers": watchers} | here.measure()
    for kind, goodbye in (("goodbye", True), ("death", False)):
        if is_broken(found):
            break
        spreads = []
        for _ in range(plan.deaths):
            spreads.append(_end_of_one(plan, here, watchers, goodbye=goodbye))
            if spreads[-1][2]:
                break
        found[f"{kind}_ms"] = {
            "first": figure(max(first for first, _, _ in spreads)),
            "last": figure(max(last for _, last, _ in spreads)),
            "spread": figure(max(last - first for first, last, _ in spreads)),
            "not_told": max(missing for _, _, missing in spreads),
        }
    return found


def is_broken(cell: dict[str, Any]) -> bool:
    """Whether streams have ended, or watchers were not told of an end: to wait for more is in vain."""
    ends = [cell[kind]["not_told"] for kind in ("goodbye_ms", "death_ms") if kind in cell]
    return bool(cell["ended"] or any(ends))


def _end_of_one(
    plan: Plan, here: Stage, watchers: int, *, goodbye: bool
) -> tuple[float, float, int]:
    """The last member ends; milliseconds until the first and the last watcher know, and who does not."""
    shares = here.shares(watchers)
    place = here.size_of_last - 1
    # One that watches cannot see its own end.
    told = [*shares[:-1], min(shares[-1], place)]
    end = here.ask_last("vanish", place, goodbye)
    found = here.ask_each([("seen", end["id"], end["incarnation"], n, _DEATH_S) for n in told])
    first = min((t for one in found for t in one["first"]), default=end["at"] + _DEATH_S)
    last = max((t for one in found for t in one["last"]), default=end["at"] + _DEATH_S)
    missing = sum(told) - sum(one["count"] for one in found)
    if not missing:
        here.ask_last("revive", place)
        if shares[-1] > place:
            here.watch(watchers)
    return 1e3 * (first - end["at"]), 1e3 * (last - end["at"]), missing


def find_break(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The first thing in the rows that is not as it should be, and where; None where all is well."""
    for row in rows:
        if "error" in row:
            return {"members": row["members"], "what": f"not all could join: {row['error']}"}
        for cell in (row["heartbeats"], *row["watching"]):
            where = {"members": row["members"], "watchers": cell.get("watchers", 0)}
            answer_ms = cell["answer_ms"]
            if cell["ended"]:
                return where | {"what": f"the monitor ended {cell['ended']} streams"}
            if cell["taken"] < _TAKEN:
                share = 100 * cell["taken"]
                return where | {"what": f"only {share:.3g} % of the heartbeats were taken"}
            if answer_ms["p99"] > _ANSWER_MS:
                return where | {"what": f"answers took {answer_ms['p99']:.4g} ms (p99)"}
            for kind in ("goodbye_ms", "death_ms"):
                if cell.get(kind, {}).get("not_told"):
                    return where | {"what": "not all watchers were told of an end"}
            if cell["cpu_cores"] > 1:
                return where | {"what": f"it takes {cell['cpu_cores']} cores"}
        if row["falsely_dead"]:
            return where | {"what": f"{row['falsely_dead']} members were taken for dead"}
    return None
