"""Compares placement policies by many replays over one routing trace, scored against one baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from eaas.errors import ConfigError
from simulator.placement.losses import node_names
from simulator.placement.planners import SPARE, STATIC, parse_name
from simulator.placement.replay import Replay, check_slots, replay
from simulator.placement.score import BASELINE_INTERVAL, BASELINE_POLICY, score
from simulator.placement.timeline import PLANNING_S
from simulator.traces import Trace

__all__ = ["Comparison", "compare"]


@dataclass(frozen=True, eq=False)
class Comparison:
    """Replays of a comparison, and their baselines.

    Attributes:
        replays: By servers, then by policy and interval, in the requested order.
        baselines: Servers -> EPLB every 1,024 iterations with the same slots.
    """

    replays: tuple[Replay, ...]
    baselines: dict[int, Replay]

    def score(self, run: Replay) -> float:
        """Return the competition's score of a replay: 100 equals the baseline with as many servers."""
        return score(run.time_s, self.baselines[run.servers].time_s)

    def document(self) -> dict[str, list[dict[str, Any]]]:
        """Return the comparison as JSON values, {"rows": [...]}; plan_ms is the mean over the plans."""
        return {
            "rows": [
                {
                    "policy": run.policy,
                    "servers": run.servers,
                    "slots": run.slots,
                    "interval": run.interval,
                    "par_mean": run.par_mean,
                    "par_p99": run.par_p99,
                    "transit": run.transit,
                    "moved_gb": run.bytes_moved / 1e9,
                    "plans": run.plans,
                    "plan_ms": 1e3 * run.plan_s,
                    "time_s": run.time_s,
                    "score": self.score(run),
                    **(
                        {}
                        if run.losses is None
                        else {"node_loss": run.losses.node, "rack_loss": run.losses.rack}
                    ),
                }
                for run in self.replays
            ]
        }


def compare(
    trace: Trace,
    policies: Sequence[str],
    *,
    servers: Sequence[int],
    intervals: Sequence[int],
    slots: int | None = None,
    planning_s: float | None = PLANNING_S,
    nodes: int | None = None,
    racks: int = 1,
    progress: Callable[[str, float], None] = lambda _what, _part: None,
) -> Comparison:
    """Replay each policy on a routing trace, with each number of servers and each planning interval.

    Args:
        policies: See `replay`; `static` has no interval and is replayed once.
        intervals: Iterations between plans.
        slots: Replicas per layer; by default E + S.
        planning_s: Assumed planning time; None: the measured one. See `replay`.
        nodes: Number of nodes that the servers are dealt to, any one of which may fail; None: unknown.
        racks: Number of racks that the nodes are dealt to.
        progress: Called with the name of the current replay and the part of all replays done.

    Raises:
        ConfigError: As `replay`, or no plan fits into the trace; raised before the first replay.
    """
    endings = {parse_name(policy)[1] for policy in policies}
    if slots is not None:
        for count in servers:
            check_slots(slots, count, trace.experts, count if SPARE in endings else 0)
    for count in servers:
        if nodes is not None and not racks <= nodes <= count:
            raise ConfigError(
                f"{nodes} nodes in {racks} racks: give at most {count} nodes, and no more racks"
            )
    for interval in intervals:
        if interval >= trace.iterations:
            raise ConfigError(
                f"interval {interval}: the trace has only {trace.iterations} iterations: "
                "give a smaller one"
            )

    jobs = [
        (count, policy, interval)
        for count in servers
        for policy in policies
        for interval in (intervals[:1] if parse_name(policy)[0] == STATIC else intervals)
    ]
    baseline_jobs = [(count, BASELINE_POLICY, BASELINE_INTERVAL) for count in servers]
    wanted = list(dict.fromkeys(jobs + baseline_jobs))
    done: dict[tuple[int, str, int], Replay] = {}
    for number, (count, policy, interval) in enumerate(wanted):

        def tell(part: float, what: str = policy, at: int = number) -> None:
            progress(what, (at + part) / len(wanted))

        done[count, policy, interval] = replay(
            trace,
            policy,
            servers=count,
            interval=interval,
            slots=slots,
            planning_s=planning_s,
            progress=tell,
            nodes=None if nodes is None else node_names(count, nodes, racks),
        )
    return Comparison(
        tuple(done[job] for job in jobs), {job[0]: done[job] for job in baseline_jobs}
    )
