"""One policy over one trace.

    PAR       peak-to-average ratio of the servers' loads of one layer in one iteration: highest over mean;
              1.0 without load. A server's load is the sum over its experts of count * share.
    loaded    replicas that a server holds after a layer's redeployment and did not hold before: what an
              expert server here would load
    transit   what the competition counts: slots whose expert changes (see `slots`). At least `loaded`, and
              equal to it but for EPLB, which lists a server's experts in another order each time.
    interval  see `timeline`

Counts are taken as they are (the competition's simulator takes 1 for 0).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from balancer.policies import Plan
from eaas.errors import ConfigError
from eaas.trace import Trace
from simulator.planners import Planner, first_layout, make_planner, parse_name
from simulator.score import EXPERT_BYTES, modelled_time
from simulator.slots import FROM_SCRATCH, changed_slots, first_table, packed_table
from simulator.splitting import split_par
from simulator.timeline import Timeline

__all__ = ["Replay", "replay"]

Shares = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Replay:
    """What became of a policy.

    Attributes:
        policy: Its name, with `+split` where each batch was split.
        servers: S.
        slots: Replicas per layer.
        interval: Iterations between plans.
        par_IL: float32 (I, L): PAR of each iteration and layer.
        transit: Slots that changed, over all layers and plans.
        loaded: Replicas that had to be loaded, over all layers and plans.
        plans: How often was planned.
        plan_s: Seconds that planning took, on the average; 0.0 where nothing was planned.
    """

    policy: str
    servers: int
    slots: int
    interval: int
    par_IL: npt.NDArray[np.float32] = field(repr=False)
    transit: int
    loaded: int
    plans: int
    plan_s: float

    @property
    def par_mean(self) -> float:
        """Over iterations and layers."""
        return float(self.par_IL.mean(dtype=np.float64))

    @property
    def par_p99(self) -> float:
        """Of all iterations and layers, 99 in 100 are not above it."""
        return float(np.percentile(self.par_IL, 99))

    @property
    def bytes_moved(self) -> int:
        """Replicas loaded, in bytes of the competition's expert."""
        return self.loaded * EXPERT_BYTES

    @property
    def time_s(self) -> float:
        """Modelled time; see `score`."""
        return modelled_time(self.par_mean, self.transit)


def replay(
    trace: Trace,
    policy: str,
    *,
    servers: int,
    interval: int,
    slots: int | None = None,
    progress: Callable[[float], None] = lambda _part: None,
    clock: Callable[[], float] = time.thread_time,
    planner: Planner | None = None,
) -> Replay:
    """Replay a policy over a trace.

    Args:
        trace: The load.
        policy: Of `planners.policy_names`, `+split` after it or not.
        servers: S.
        interval: Iterations between plans.
        slots: Replicas per layer; by default one expert more for each server: E + S.
        progress: Called with the part that is done, 0 to 1.
        clock: Seconds that planning takes; by default of this thread's processor time, which a busy machine
            does not lengthen.
        planner: Asked in place of the policy of that name.

    Raises:
        ConfigError: Unknown policy, servers or interval below 1, the slots do not cover the experts, or the
            policy refuses them.

    Time O(I * L * S * E) multiplications in float32 (a matrix product for each layer and plan), beside the
    policy's own; memory O(I * L) beside the trace.
    """
    slots = trace.experts + servers if slots is None else slots
    for name, value, least in (
        ("servers", servers, 1),
        ("interval", interval, 1),
        ("slots", slots, trace.experts),
    ):
        if value < least:
            raise ConfigError(f"{name} {value}: give at least {least}")
    base, batch_split = policy, False
    if planner is None:
        base, batch_split = parse_name(policy)
        planner = make_planner(base, servers, slots)
    holds_LSE, shares_LSE = first_layout(trace.layers, servers, trace.experts)
    tables = _Tables(holds_LSE, slots) if base in FROM_SCRATCH else None
    par_IL = np.ones((trace.iterations, trace.layers), np.float32)
    since_L = [0] * trace.layers

    def serve(layer: int, until: int) -> None:
        """Measure what the layer has served as it is, up to an iteration."""
        counts_IE = trace.counts_ILE[since_L[layer] : until, layer]
        measure = split_par if batch_split else _par
        par_IL[since_L[layer] : until, layer] = measure(counts_IE, shares_LSE[layer])
        since_L[layer] = until

    timeline = Timeline(interval, trace.iterations)
    transit, loaded, plan_s = 0, 0, []
    while planner is not None and (done := timeline.next_plan) is not None:
        counts_WLE = trace.counts_ILE[done - interval : done]
        load_LE = counts_WLE.sum(axis=0, dtype=np.float64)
        think = planner.step(counts_WLE, load_LE, holds_LSE.copy())
        began = clock()
        try:
            plan = think()
        except ValueError as error:
            raise ConfigError(f"policy {policy} cannot plan this: {error}") from error
        plan_s.append(clock() - began)
        changed_L = (plan.holds_LSE != holds_LSE).any(axis=(1, 2))
        ready, deployed = timeline.deploy(done, plan_s[-1], np.flatnonzero(changed_L).tolist())
        for layer in range(trace.layers):
            at = deployed.get(layer) if changed_L[layer] else ready
            if at is None or at > trace.iterations:
                continue
            serve(layer, at)
            new = int(np.count_nonzero(plan.holds_LSE[layer] > holds_LSE[layer]))
            loaded += new
            transit += tables.change(layer, plan, load_LE) if tables else new
            holds_LSE[layer], shares_LSE[layer] = plan.holds_LSE[layer], plan.shares_LSE[layer]
        progress(done / trace.iterations)
    for layer in range(trace.layers):
        serve(layer, trace.iterations)
    progress(1.0)
    return Replay(
        policy=policy,
        servers=servers,
        slots=slots,
        interval=interval,
        par_IL=par_IL,
        transit=transit,
        loaded=loaded,
        plans=len(plan_s),
        plan_s=float(np.mean(plan_s)) if plan_s else 0.0,
    )


class _Tables:
    """The slot tables of a policy that plans from scratch."""

    def __init__(self, holds_LSE: npt.NDArray[np.bool_], slots: int) -> None:
        servers = holds_LSE.shape[1]
        slots_S = slots // servers + (np.arange(servers) < slots % servers)
        self._tables = [first_table(holds_SE, slots_S) for holds_SE in holds_LSE]

    def change(self, layer: int, plan: Plan, load_LE: npt.NDArray[np.float64]) -> int:
        """Redeploy a layer; returns the transit. A layer that stays as it is has none."""
        old_SR = self._tables[layer]
        new_SR = packed_table(plan.holds_LSE[layer], load_LE[layer], old_SR.shape[1])
        self._tables[layer] = new_SR
        return changed_slots(old_SR, new_SR)


def _par(counts_IE: npt.NDArray[np.generic], shares_SE: Shares) -> npt.NDArray[np.float32]:
    """float32 (I): PAR of each iteration under fixed shares."""
    load_IS = counts_IE.astype(np.float32) @ shares_SE.astype(np.float32).T
    mean_I = load_IS.mean(axis=1)
    par_I = np.ones(len(mean_I), np.float32)
    np.divide(load_IS.max(axis=1), mean_I, out=par_I, where=mean_I > 0)
    return par_I
