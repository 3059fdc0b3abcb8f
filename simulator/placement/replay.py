"""Replays one placement policy over one routing trace, in simulated time.

    PAR       peak-to-average ratio of the servers' loads of one layer in one iteration; 1.0 without load.
              A server's load is the sum over its experts of count * share.
    transit   replicas that servers load (the competition counts slots that change, see `calibration`)
    interval  iterations between plans, see `timeline`

Counts are used unchanged (the competition's simulator replaces 0 by 1).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from balancer.policies.prices import EXPERT_BYTES
from balancer.policies.sparse import Layout
from eaas.errors import ConfigError
from simulator.placement.losses import Losses
from simulator.placement.measures import dispatch_par, share_par, split_par
from simulator.placement.planners import (
    DISPATCH,
    SPARE,
    SPLIT,
    Planner,
    first_layout,
    make_planner,
    parse_name,
)
from simulator.placement.score import modelled_time
from simulator.placement.sparing import Serving, replay_spares
from simulator.placement.timeline import PLANNING_S, Timeline
from simulator.traces import Trace

__all__ = ["Replay", "check_slots", "replay"]

_MEASURES = {"": share_par, SPLIT: split_par, DISPATCH: dispatch_par}


@dataclass(frozen=True, eq=False)
class Replay:
    """The result of a replay.

    Attributes:
        policy: The policy's name, with `+split`, `+dispatch` or `+spare` if each batch was divided.
        servers: S.
        slots: Replicas per layer.
        interval: Iterations between plans.
        par_IL: float32 (I, L): PAR of each iteration and layer.
        transit: Loaded replicas, over all layers and plans, and over all calls with `+spare`.
        plan_s: Mean measured planning time in seconds; 0.0 without plans.
        losses: Tokens that a failing node or rack takes along; None: nodes are unknown.
    """

    policy: str
    servers: int
    slots: int
    interval: int
    par_IL: npt.NDArray[np.float32] = field(repr=False)
    transit: int
    plans: int
    plan_s: float
    losses: Losses | None = None

    @property
    def par_mean(self) -> float:
        """Peak-to-average ratio of server loads (PAR), mean over iterations and layers; 1.0 is perfect."""
        return float(self.par_IL.mean(dtype=np.float64))

    @property
    def par_p99(self) -> float:
        """Peak-to-average ratio of server loads (PAR), 99th percentile over iterations and layers."""
        return float(np.percentile(self.par_IL, 99))

    @property
    def bytes_moved(self) -> int:
        """Bytes of the loaded replicas, at the size of the competition's expert (see `score`)."""
        return self.transit * EXPERT_BYTES

    @property
    def time_s(self) -> float:
        """Modelled seconds of computing and loading, which the score compares (see `score`)."""
        return modelled_time(self.par_mean, self.transit)


def replay(
    trace: Trace,
    policy: str,
    *,
    servers: int,
    interval: int,
    slots: int | None = None,
    planning_s: float | None = PLANNING_S,
    progress: Callable[[float], None] = lambda _part: None,
    planner: Planner | None = None,
    nodes: Sequence[str] | None = None,
    served: Callable[[Serving], None] = lambda _serving: None,
) -> Replay:
    """Replay a policy over a routing trace: re-plan and redeploy on its timeline, and measure the PAR.

    Args:
        policy: One of `planners.policy_names`, with or without `+split`, `+dispatch` or `+spare`.
        servers: S.
        interval: Iterations between plans.
        slots: Replicas per layer; by default E + S, one redundant expert per server. With `+spare` one slot
            of each server is spare, and the policy plans with the others.
        planning_s: Assumed planning time (see `timeline`), which makes replays equal on every machine; None:
            the measured time, which is in `plan_s` in any case.
        progress: Called with the part done, 0 to 1.
        planner: Replaces the policy of that name, which may be unknown; an ending still counts.
        nodes: Names of the servers' nodes (`losses.node_names`), which the policy then knows, and any one of
            which may fail; None: unknown.
        served: Called with each placement of a layer, when it ends.

    Raises:
        ConfigError: Unknown policy, servers or interval below 1, planning_s below 0, slots that do not
            cover the experts or exceed the servers, or the policy refuses them.

    Time O(I * L * S * E) multiplications in float32 (a matrix product for each layer and plan), plus the
    policy's own; more with `+split`, `+dispatch` and `+spare`. Memory O(I * L) plus the trace.
    """
    for name, value in (("servers", servers), ("interval", interval)):
        if value < 1:
            raise ConfigError(f"{name} {value}: give at least 1")
    if planning_s is not None and not 0 <= planning_s < math.inf:
        raise ConfigError(f"planning {planning_s}: give seconds, at least 0")
    slots = trace.experts + servers if slots is None else slots
    planner, ending = _planner(planner, policy, servers, slots, trace.experts, nodes)
    deployment = _Deployment(trace, policy, servers, planner, interval, planning_s)
    losses = None if nodes is None else Losses(nodes)

    def servings() -> Iterator[Serving]:
        for serving in deployment.run(progress if ending != SPARE else lambda _part: None):
            if losses is not None:
                tokens_E = _counts(trace, serving).sum(axis=0, dtype=np.float64)
                losses.add(serving.layout.dense()[0][0], tokens_E)
            served(serving)
            yield serving

    par_IL, spare_loads = _measure(trace, servings(), ending, progress)
    plan_s = deployment.plan_s
    progress(1.0)
    return Replay(
        policy=policy,
        servers=servers,
        slots=slots,
        interval=interval,
        par_IL=par_IL,
        transit=deployment.transit + spare_loads,
        plans=len(plan_s),
        plan_s=float(np.mean(plan_s)) if plan_s else 0.0,
        losses=losses,
    )


def _measure(
    trace: Trace, servings: Iterator[Serving], ending: str, progress: Callable[[float], None]
) -> tuple[npt.NDArray[np.float32], int]:
    """Return the PAR of each iteration and layer, and the number of replicas loaded to spare slots."""
    if ending == SPARE:
        # Links carry the spare replicas of all layers, so that placements are measured together.
        run = replay_spares(trace.counts_ILE, list(servings), progress=progress)
        return run.par_IL, int(run.loads_IL.sum())
    par_IL = np.ones((trace.iterations, trace.layers), np.float32)
    for serving in servings:
        shares_SE = serving.layout.dense()[1][0]
        par_I = _MEASURES[ending](_counts(trace, serving), shares_SE)
        par_IL[serving.begin : serving.end, serving.layer] = par_I
    return par_IL, 0


def _counts(trace: Trace, serving: Serving) -> npt.NDArray[np.unsignedinteger[Any]]:
    """(I, E): counts of the iterations that a placement serves."""
    return trace.counts_ILE[serving.begin : serving.end, serving.layer]


def _planner(
    given: Planner | None,
    policy: str,
    servers: int,
    slots: int,
    experts: int,
    nodes: Sequence[str] | None,
) -> tuple[Planner | None, str]:
    """Return the planner of a policy, and the ending of its name. Raises ConfigError."""
    if given is not None:
        check_slots(slots, servers, experts)
        return given, policy.removeprefix(policy.partition("+")[0])
    base, ending = parse_name(policy)
    spare = servers if ending == SPARE else 0
    check_slots(slots, servers, experts, spare)
    return make_planner(base, servers, slots - spare, nodes), ending


class _Deployment:
    """The placements of a replay: planned, and deployed layer by layer.

    Attributes:
        transit: Replicas that servers loaded so far.
        plan_s: Measured time of each plan.
    """

    def __init__(
        self,
        trace: Trace,
        policy: str,
        servers: int,
        planner: Planner | None,
        interval: int,
        planning_s: float | None,
    ) -> None:
        self._trace, self._policy, self._planner = trace, policy, planner
        self._interval, self._planning_s = interval, planning_s
        self._timeline = Timeline(interval, trace.iterations)
        first = first_layout(trace.layers, servers, trace.experts)
        self._serving_L = [
            Serving(layer, 0, trace.iterations, layout)
            for layer, layout in enumerate(_layers(first))
        ]
        self.transit = 0
        self.plan_s: list[float] = []

    def run(self, progress: Callable[[float], None]) -> Iterator[Serving]:
        """Plan and redeploy to the end of the trace; yield each layer's placements in their order."""
        while self._planner is not None and (done := self._timeline.next_plan) is not None:
            yield from self._redeploy(done, self._planner)
            progress(done / self._trace.iterations)
        yield from self._serving_L

    def _redeploy(self, done: int, planner: Planner) -> Iterator[Serving]:
        """Plan after `done` iterations; yield the placements that end."""
        counts_WLE = self._trace.counts_ILE[done - self._interval : done]
        load_LE = counts_WLE.sum(axis=0, dtype=np.float64)
        current = Layout.joined([serving.layout for serving in self._serving_L])
        think = planner.step(counts_WLE, load_LE, current)
        # This thread's processor time does not depend on other load of the machine.
        began = time.thread_time()
        try:
            plan = think()
        except ValueError as error:
            raise ConfigError(f"policy {self._policy} cannot plan this: {error}") from error
        self.plan_s.append(time.thread_time() - began)
        loads_L = plan.layout.added_to(current)
        changed_L = (loads_L > 0) | (current.added_to(plan.layout) > 0)
        ready, deployed = self._timeline.deploy(
            done,
            self.plan_s[-1] if self._planning_s is None else self._planning_s,
            np.flatnonzero(changed_L).tolist(),
        )
        for layer, layout in enumerate(_layers(plan.layout)):
            at = deployed.get(layer) if changed_L[layer] else ready
            if at is None or at > self._trace.iterations:
                continue
            yield replace(self._serving_L[layer], end=at)
            self.transit += int(loads_L[layer])
            self._serving_L[layer] = Serving(
                layer, at, self._trace.iterations, layout, load_LE[layer]
            )


def _layers(layout: Layout) -> list[Layout]:
    return [layout.part(layer, layer + 1) for layer in range(layout.shape[0])]


def check_slots(slots: int, servers: int, experts: int, spare: int = 0) -> None:
    """Raise ConfigError if there are too few replicas per layer, or more than servers can hold.

    Args:
        spare: Slots among them that cannot hold an expert's only replica.
    """
    if slots < experts + spare:
        more = f", and {spare} spare ones" if spare else ""
        raise ConfigError(
            f"slots {slots}: give at least {experts + spare}, one for each expert{more}"
        )
    if slots > experts * servers:
        raise ConfigError(f"slots {slots}: give at most {experts * servers}, all on each server")
