"""The balancer's cost-benefit evaluator: is another placement worth its moves? Pure functions.

    gain      fall of the PAR, mean over layers. A layer ends when its last server is done: at PAR 1.5 it
              takes half as long again
    payback   seconds of service until the gain equals the cost of the loads

Shape suffixes: L layers, S servers, E logical experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from balancer.planner.backups import primaries, with_least_shares
from balancer.planner.layout import HORIZON_S, Settings, Situation, best_shares, lay_out, slots
from balancer.policies.anti_affinity import count_on_one_node
from balancer.policies.bounds import par_bound
from balancer.policies.measure import par
from balancer.policies.moves import Move, ordered_moves
from balancer.policies.problem import make_problem
from balancer.policies.types import Float, Holds, Shares
from eaas.counted import counted

__all__ = ["Proposal", "planning_bound", "weigh"]

LEAST_GAIN = 0.02
"""Fall of the mean PAR below which nothing changes."""


@dataclass(frozen=True, eq=False)
class Proposal:
    """A layout, its value, and whether it should replace the current one.

    Attributes:
        kind: "nothing": no change; "shares": new shares of held replicas; "moves": the moves pay back.
        reason: Why, for people.
        servers: Index S.
        holds_LSE, shares_LSE: The layout to adopt; the current one for "nothing".
        par_now_L, par_then_L: PAR under the window's load, now and with the planned layout.
        bound_L: No layout with these slots has a lower PAR.
        moves: Moves to the planned layout, in order.
        bytes: Bytes that the moves load.
        gain: Fall of the mean PAR, compared with the best shares of the held replicas.
        payback_s: inf without a gain.
        planned: The policy's layout, whether adopted or not.
    """

    kind: Literal["nothing", "shares", "moves"]
    reason: str
    servers: tuple[str, ...]
    holds_LSE: Holds
    shares_LSE: Shares
    par_now_L: Float
    par_then_L: Float
    bound_L: Float
    moves: tuple[Move, ...]
    bytes: int
    gain: float
    payback_s: float
    planned: tuple[Holds, Shares] = field(repr=False)

    @property
    def transit(self) -> int:
        """Number of replicas that servers load for the planned moves, whether adopted or not."""
        return sum(move.kind == "load" for move in self.moves)


def planning_bound(settings: Settings, now: Situation) -> Float:
    """float64 (L): lower bound of the PAR of any layout with the policy's slots, for plans and metrics."""
    _, slots_LS = slots(settings, now)
    return par_bound(make_problem(now.load_LE, len(now.servers), slots_LS, None, now.speeds_S))


def weigh(settings: Settings, now: Situation) -> Proposal:
    """Plan, and decide whether to adopt the plan, only new shares, or nothing. Rolls nothing out.

    Raises:
        ValueError: As `lay_out`.
    """
    load_LE, speeds_S = now.load_LE, now.speeds_S
    now_shares = now.shares_LSE.astype(np.float64)
    par_now_L = par(load_LE, now.holds_LSE, now_shares, speeds_S)
    cap_LS, _ = slots(settings, now)
    # Step 1: new shares, which move nothing.
    kept_LSE = primaries(now.holds_LSE, now.shares_LSE)
    level_LSE = with_least_shares(kept_LSE, now.holds_LSE, best_shares(load_LE, kept_LSE, speeds_S))
    par_level_L = par(load_LE, now.holds_LSE, level_LSE, speeds_S)
    # Step 2: the policy's layout.
    holds_LSE, shares_LSE = lay_out(settings, now)
    par_then_L = par(load_LE, holds_LSE, shares_LSE, speeds_S)
    moves = ordered_moves(now.holds_LSE, holds_LSE, np.maximum(cap_LS, now.holds_LSE.sum(axis=2)))
    loads = int(np.count_nonzero(holds_LSE > now.holds_LSE))
    gain = float((par_level_L - par_then_L).mean())
    cost_s = loads * (now.expert_bytes / settings.link_bytes_per_s + settings.stall_s)
    payback_s = cost_s / gain if gain > 0 else np.inf
    # Step 3: choose.
    least = max(LEAST_GAIN, _noise(now))
    level_gain = float((par_now_L - par_level_L).mean())
    effects = (
        f"other shares change the mean PAR by {round(-level_gain, 3) + 0.0:+.3f}, "
        f"{counted(loads, 'load')} by {round(-gain, 3) + 0.0:+.3f} more"
    )
    if not now.holds_LSE.any(axis=1).all():
        kind, why = "moves", "there are experts without a server"
    elif (cross_node := _cross_node(settings, now, kept_LSE)) and moves:
        kind = "moves"
        why = f"a layer has {counted(cross_node, 'replica')} on other nodes: above the node budget"
    elif (together := _together(settings, now, holds_LSE)) and moves:
        kind = "moves"
        why = f"{counted(together, 'expert')} fewer with all replicas on one node"
    elif moves and gain >= least and payback_s <= HORIZON_S:
        kind, why = "moves", f"{effects}; the loads pay back in {payback_s:.1f} s"
    elif level_gain >= least:
        kind, why = "shares", f"{effects}; more loads do not pay"
    elif gain >= least:
        kind, why = "nothing", f"{effects}; the loads pay back in {payback_s:.1f} s, too late"
    else:
        reason = f"less than {least:.3f} may be noise" if np.isfinite(least) else "no load was seen"
        kind, why = "nothing", f"{effects}; {reason}"
    layouts = {
        "moves": (holds_LSE, shares_LSE),
        "shares": (now.holds_LSE, level_LSE),
        "nothing": (now.holds_LSE, now_shares),
    }
    chosen_LSE, chosen_shares = layouts[kind]
    return Proposal(
        kind=kind,  # type: ignore[arg-type]
        reason=why,
        servers=now.servers,
        holds_LSE=chosen_LSE,
        shares_LSE=chosen_shares,
        par_now_L=par_now_L,
        par_then_L=par_level_L if kind == "shares" else par_then_L,
        bound_L=planning_bound(settings, now),
        moves=moves,
        bytes=loads * now.expert_bytes,
        gain=gain,
        payback_s=payback_s,
        planned=(holds_LSE, shares_LSE),
    )


def _cross_node(settings: Settings, now: Situation, primary_LSE: Holds) -> int:
    """Return a layer's most cross-node replicas if above the budget, which then forces moves; else 0."""
    if settings.node_budget is None or now.nodes_S is None:
        return 0
    held_NLE = [primary_LSE[:, now.nodes_S == node].any(axis=1) for node in np.unique(now.nodes_S)]
    further_L = (np.sum(held_NLE, axis=0) - 1).clip(0).sum(axis=1)
    return int(further_L.max()) if further_L.max() > settings.node_budget else 0


def _together(settings: Settings, now: Situation, then_LSE: Holds) -> int:
    """Return by how many fewer experts with several replicas would have them all on one node; at least 0."""
    if settings.redundancy < 2 or now.nodes is None:
        return 0
    before, then = (count_on_one_node(h, now.nodes, replicas=2) for h in (now.holds_LSE, then_LSE))
    return max(0, before - then)


def _noise(now: Situation) -> float:
    """Estimate the sampling noise of the PAR, mean over layers: smaller gains change nothing.

    A server's load is a count of n / S tokens, so its relative deviation is at most sqrt(S / n). The estimate
    is twice that.
    """
    tokens_L = now.load_LE.sum(axis=1)
    known_L = tokens_L[tokens_L > 0]
    if not known_L.size:
        return float("inf")
    return float(2 * np.sqrt(len(now.servers) / known_L).mean())
