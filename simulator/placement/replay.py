"""Replays one placement policy over one routing trace, in simulated time.

    PAR       peak-to-average ratio of the servers' loads of one layer in one iteration; 1.0 without load.
              A server's load is the sum over its experts of count * share.
    transit   replicas that servers load (the competition counts slots whose expert changes, see `slots`)
    interval  iterations between plans, see `timeline`

Counts are used unchanged (the competition's simulator replaces 0 by 1).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from balancer.policies.measure import over_mean
from balancer.policies.prices import EXPERT_BYTES
from balancer.policies.sparse import Layout
from eaas.errors import ConfigError
from simulator.placement.losses import Losses
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
from simulator.placement.splitting import dispatch_par, split_par
from simulator.placement.timeline import PLANNING_S, Timeline
from simulator.traces import Trace

__all__ = ["Replay", "check_slots", "replay"]

Holds = npt.NDArray[np.bool_]
Float = npt.NDArray[np.float64]


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
    redeployed: Callable[[int, Holds, Float], None] | None = None,
    clock: Callable[[], float] = time.thread_time,
    planner: Planner | None = None,
    nodes: Sequence[str] | None = None,
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
        redeployed: Called for each layer that gets a plan, with layer, new holds and planned load.
        clock: Clock for planning time; by default this thread's processor time, which does not depend on
            other load of the machine.
        planner: Replaces the policy of that name.
        nodes: Names of the servers' nodes (`losses.node_names`), which the policy then knows, and any one of
            which may fail; None: unknown.

    Raises:
        ConfigError: Unknown policy, servers or interval below 1, planning_s below 0, slots that do not
            cover the experts or exceed the servers, or the policy refuses them.

    Time O(I * L * S * E) multiplications in float32 (a matrix product for each layer and plan), plus the
    policy's own; more with `+split`, `+dispatch` and `+spare`. Memory O(I * L) plus the trace.
    """
    slots = trace.experts + servers if slots is None else slots
    for name, value, least in (
        ("servers", servers, 1),
        ("interval", interval, 1),
    ):
        if value < least:
            raise ConfigError(f"{name} {value}: give at least {least}")
    if planning_s is not None and not 0 <= planning_s < math.inf:
        raise ConfigError(f"planning {planning_s}: give seconds, at least 0")
    base, ending = policy, ""
    if planner is not None:
        check_slots(slots, servers, trace.experts)
    else:
        base, ending = parse_name(policy)
        spare = servers if ending == SPARE else 0
        check_slots(slots, servers, trace.experts, spare)
        planner = make_planner(base, servers, slots - spare, nodes)
    # Layer by layer, as plans are deployed.
    serving_L = _layers(first_layout(trace.layers, servers, trace.experts))
    par_IL = np.ones((trace.iterations, trace.layers), np.float32)
    since_L = [0] * trace.layers
    losses = None if nodes is None else Losses(nodes)
    servings: list[Serving] = []

    def serve(layer: int, until: int) -> None:
        """Measure a layer's PAR with its current placement, from the last change up to an iteration."""
        counts_IE = trace.counts_ILE[since_L[layer] : until, layer]
        holds_LSE, shares_LSE = serving_L[layer].dense()
        if ending == SPARE:
            # Links carry the loads of all layers, so that they are replayed together, at the end.
            servings.append(Serving(layer, since_L[layer], until, serving_L[layer]))
        else:
            measure = {SPLIT: split_par, DISPATCH: dispatch_par}.get(ending, _par)
            par_IL[since_L[layer] : until, layer] = measure(counts_IE, shares_LSE[0])
        since_L[layer] = until
        if losses is not None:
            losses.add(holds_LSE[0], counts_IE.sum(axis=0, dtype=np.float64))

    timeline = Timeline(interval, trace.iterations)
    transit, plan_s = 0, []
    while planner is not None and (done := timeline.next_plan) is not None:
        counts_WLE = trace.counts_ILE[done - interval : done]
        load_LE = counts_WLE.sum(axis=0, dtype=np.float64)
        current = Layout.joined(serving_L)
        think = planner.step(counts_WLE, load_LE, current)
        began = clock()
        try:
            plan = think()
        except ValueError as error:
            raise ConfigError(f"policy {policy} cannot plan this: {error}") from error
        plan_s.append(clock() - began)
        loads_L = plan.layout.added_to(current)
        changed_L = (loads_L > 0) | (current.added_to(plan.layout) > 0)
        ready, deployed = timeline.deploy(
            done,
            plan_s[-1] if planning_s is None else planning_s,
            np.flatnonzero(changed_L).tolist(),
        )
        planned_L = _layers(plan.layout)
        for layer in range(trace.layers):
            at = deployed.get(layer) if changed_L[layer] else ready
            if at is None or at > trace.iterations:
                continue
            serve(layer, at)
            transit += int(loads_L[layer])
            serving_L[layer] = planned_L[layer]
            if redeployed is not None:
                redeployed(layer, serving_L[layer].dense()[0][0], load_LE[layer])
        if ending != SPARE:
            progress(done / trace.iterations)
    for layer in range(trace.layers):
        serve(layer, trace.iterations)
    if ending == SPARE:
        run = replay_spares(trace.counts_ILE, servings, progress=progress)
        par_IL[:] = run.par_IL
        transit += int(run.loads_IL.sum())
    progress(1.0)
    return Replay(
        policy=policy,
        servers=servers,
        slots=slots,
        interval=interval,
        par_IL=par_IL,
        transit=transit,
        plans=len(plan_s),
        plan_s=float(np.mean(plan_s)) if plan_s else 0.0,
        losses=losses,
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


def _par(counts_IE: npt.NDArray[np.generic], shares_SE: Float) -> npt.NDArray[np.float32]:
    """float32 (I): PAR of a layer in each iteration under fixed shares."""
    load_IS = counts_IE.astype(np.float32) @ shares_SE.astype(np.float32).T
    return over_mean(load_IS.max(axis=1), load_IS.mean(axis=1))
