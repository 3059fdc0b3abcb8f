"""The run of `python -m benchmarks.monitor` and its document."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import grpc

from benchmarks.monitor.plan import Plan
from benchmarks.monitor.stage import Stage, stage
from eaas.config import MonitorConfig
from eaas.errors import ClusterError
from eaas_cli.bench.figures import figure
from eaas_cli.bench.machine import busy_core_seconds, describe_machine

__all__ = ["bench_monitor", "is_broken", "watching_step"]

# Deadline for all watchers to see a death.
_DEATH_S = 30.0


def bench_monitor(plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure a monitor with growing numbers of members.

    Returns:
        The document of `python -m benchmarks.monitor --json` (see the package docstring).

    Raises:
        EaasError: A process did not start, or a process of members ended.
    """
    began, busy_s = time.monotonic(), busy_core_seconds()
    rows: list[dict[str, Any]] = []
    for members in plan.members:
        rows.append(_row(plan, members, say))
        if not rows[-1]["watching"]:
            break
    return {
        "machine": describe_machine()
        | {
            "grpc": grpc.__version__,
            # The busy cores include this benchmark.
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
        "rows": rows,
    }


def _row(plan: Plan, members: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure one number of members; the row has no `watching` if they cannot join."""
    row: dict[str, Any] = {"members": members, "watching": []}
    with stage(plan, members) as here:
        say(f"{members} members join")
        try:
            row["join_s"] = figure(max(here.ask("join")))
        except ClusterError as error:
            return row | {"error": str(error)}
        say(f"{members} members, no watchers")
        row["heartbeats"] = here.measure()
        snapshot, took_s = here.snapshot()
        row["snapshot"] = {"bytes": snapshot.ByteSize(), "ms": figure(1e3 * took_s)}
        say(f"{members} members, {plan.snapshot_watchers} watchers fetch snapshots")
        row["snapshots"] = here.fetch_snapshots(plan.snapshot_watchers)
        for watchers in plan.watcher_steps(members):
            say(f"{members} members, {watchers} watch")
            row["watching"].append(watching_step(plan, here, watchers))
            if is_broken(row["watching"][-1]):
                say("the monitor is behind or has ended streams: the step ends here")
                break
    return row


def watching_step(plan: Plan, here: Stage, watchers: int) -> dict[str, Any]:
    """Measure the monitor with watchers, and the time until they see a member's end."""
    here.watch(watchers)
    found = {"watchers": watchers} | here.measure()
    for kind, goodbye in (("goodbye", True), ("death", False)):
        if is_broken(found):
            break
        spreads = []
        for _ in range(plan.deaths):
            spreads.append(_end_of_one(here, watchers, goodbye=goodbye))
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
    """Whether the monitor ended streams or watchers missed a member's end, which ends the step."""
    ends = [cell[kind]["not_told"] for kind in ("goodbye_ms", "death_ms") if kind in cell]
    return bool(cell["ended"] or any(ends))


def _end_of_one(here: Stage, watchers: int, *, goodbye: bool) -> tuple[float, float, int]:
    """End the last member; return when the first and the last watcher saw it (ms), and how many did not."""
    shares = here.shares(watchers)
    place = here.size_of_last - 1
    # A watcher does not see its own end.
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
