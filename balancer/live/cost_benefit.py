"""The balancer's cost-benefit evaluator: is another placement worth its moves? Pure functions.

    layout    which server holds which experts, and what share of an expert's tokens each holder takes
    capacity  replicas that a server has memory for, over all layers
    gain      fall of the PAR, mean over layers. A layer ends when its last server is done: at PAR 1.5 it
              takes half as long again
    payback   seconds of service until the gain equals the cost of the loads

Shape suffixes: L layers, S servers, E logical experts, W steps.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

import balancer.policies as policies
from balancer.planner.backups import deal, primaries, with_backups, with_least_shares
from balancer.policies.anti_affinity import Nodes, apply_anti_affinity, count_on_one_node
from balancer.policies.bounds import par_bound
from balancer.policies.measure import par
from balancer.policies.moves import Move, ordered_moves
from balancer.policies.problem import make_problem
from balancer.policies.registry import find
from balancer.policies.types import Float, Holds, Int, Shares
from eaas.counted import counted
from eaas.minmax import split

__all__ = [
    "HORIZON_S",
    "STATIC_POLICY",
    "Proposal",
    "Settings",
    "Situation",
    "check_node_budget",
    "lay_out",
    "pinned",
    "planning_bound",
    "weigh",
]

STATIC_POLICY = "spread"
"""The policy that ignores load: replicas move only when servers come or go."""

_NO_LIMIT = np.int64(1) << 40
# Smaller changes print as 0.000.
_SEEN = 0.0005


HORIZON_S = 600.0
"""Seconds of service within which moves must pay back their cost."""
LEAST_GAIN = 0.02
"""Fall of the mean PAR below which nothing changes."""


@dataclass(frozen=True)
class Settings:
    """The operator's settings for placements (`BalancerConfig` and later calls).

    Attributes:
        policy: One of `balancer.policies.names()`.
        redundancy: Fewest servers that hold each expert.
        num_redundant_experts: Replicas per layer that the policy may place beyond one of each expert.
        link_bytes_per_s: Rate at which servers load experts.
        stall_s: Seconds of service that a load costs in addition to its bytes.
        knobs: The policy's own parameters, by name, as the operator set them.
        tuned: The same, as the control loop set them; `knobs` take precedence.
        node_budget: Most replicas per layer on other nodes than their expert's first one, without backups.
            None: any number.
        pins: Required replicas: (layer, expert, server).
    """

    policy: str = STATIC_POLICY
    redundancy: int = 2
    num_redundant_experts: int = 0
    link_bytes_per_s: float = 1e9
    stall_s: float = 0.0
    knobs: Mapping[str, Any] = field(default_factory=dict)
    tuned: Mapping[str, Any] = field(default_factory=dict)
    node_budget: int | None = None
    pins: frozenset[tuple[int, int, str]] = frozenset()


@dataclass(frozen=True, eq=False)
class Situation:
    """The input of a plan, observed or hypothetical: servers, what they hold, their load, speed and memory.

    Attributes:
        servers: The servers of the layout.
        holds_LSE: bool; experts that they hold now. A new server holds nothing.
        shares_LSE: float; shares of the current placement.
        load_LE: float64; tokens of each expert in the window.
        speeds_S: float64, above 0.
        capacity_S: int64; replicas over all layers. None: no limits.
        expert_bytes: Bytes of a replica.
        window_WLE: Tokens by step, for policies that need more than the sum; None: no window.
        nodes_S: Names or numbers of the servers' nodes (`Nodes.of`). None: unknown.
        away_LE: int64; replicas on dead servers that may come back. None: no such servers.
    """

    servers: tuple[str, ...]
    holds_LSE: Holds
    shares_LSE: npt.NDArray[np.floating]
    load_LE: Float
    speeds_S: Float
    capacity_S: Int | None = None
    expert_bytes: int = 0
    window_WLE: npt.NDArray[np.int64] | None = None
    nodes_S: npt.NDArray[Any] | None = None
    away_LE: Int | None = None


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


def pinned(settings: Settings, servers: Sequence[str], holds_LSE: Holds) -> Holds | None:
    """Return the pinned replicas among those of a layout, bool (L, S, E); None: there are none."""
    if not settings.pins:
        return None
    pinned_LSE = np.zeros_like(holds_LSE)
    for layer, expert, server in settings.pins:
        if server in servers:
            pinned_LSE[layer, servers.index(server), expert] = True
    return np.asarray(pinned_LSE & holds_LSE)


def lay_out(settings: Settings, now: Situation) -> tuple[Holds, Shares]:
    """Compute the policy's layout, with backups and pins, for plans and for the planner's repairs.

    Replicas of an expert go to different nodes; within a node budget only backups do.

    Raises:
        ValueError: There is not enough capacity, or a knob is wrong; the message says which.
    """
    cap_LS, slots_LS = _slots(settings, now)
    kept_LSE = primaries(now.holds_LSE, now.shares_LSE)
    load_LE = now.load_LE if now.load_LE.any() else np.ones_like(now.load_LE)
    plan = policies.plan(
        settings.policy,
        load_LE,
        len(now.servers),
        slots_LS,
        current=kept_LSE if now.holds_LSE.any() else None,
        speeds_S=now.speeds_S,
        **_knobs(settings, now),
    )
    primary_LSE = plan.holds_LSE.copy()
    for layer, expert, server in settings.pins:
        if server in now.servers:
            primary_LSE[layer, now.servers.index(server), expert] = True
    # The policy's own shares are replaced because they are equal or for a forecast. Clients can follow any
    # shares, and the next evaluation would ask for those that are best for the window.
    shares_LSE = best_shares(load_LE, primary_LSE, now.speeds_S)
    nodes = None if now.nodes_S is None else Nodes.of(now.nodes_S.tolist())
    if nodes is not None and nodes.count < 2:
        nodes = None
    holds_LSE = with_backups(
        *(primary_LSE, now.holds_LSE, settings.redundancy, cap_LS, now.away_LE),
        nodes_S=None if nodes is None else nodes.node_S,
    )
    shares_LSE = with_least_shares(primary_LSE, holds_LSE, shares_LSE)
    if nodes is None:
        return holds_LSE, shares_LSE
    fixed_LSE = pinned(settings, now.servers, holds_LSE)
    if settings.node_budget is not None:
        fixed_LSE = primary_LSE
    risen_L = apply_anti_affinity(
        *(holds_LSE, shares_LSE, nodes),
        load_LE=load_LE,
        speeds_S=now.speeds_S,
        current_LSE=now.holds_LSE if now.holds_LSE.any() else None,
        fixed_LSE=fixed_LSE,
        spread_over=settings.redundancy,
    )
    if risen_L:
        primary_LSE = primaries(holds_LSE[risen_L], shares_LSE[risen_L])
        best_LSE = best_shares(load_LE[risen_L], primary_LSE, now.speeds_S)
        shares_LSE[risen_L] = with_least_shares(primary_LSE, holds_LSE[risen_L], best_LSE)
    return holds_LSE, shares_LSE


def best_shares(load_LE: Float, holds_LSE: Holds, speeds_S: Float) -> Shares:
    """float64 (L, S, E): shares with the lowest PAR for these holds; even for experts without load."""
    replicas_LE = np.maximum(holds_LSE.sum(axis=1, keepdims=True), 1)
    even_LSE = holds_LSE / replicas_LE
    return np.stack(
        [
            split(load_E, even_SE, speeds_S)
            for load_E, even_SE in zip(load_LE, even_LSE, strict=True)
        ]
    )


def planning_bound(settings: Settings, now: Situation) -> Float:
    """float64 (L): lower bound of the PAR of any layout with the policy's slots, for plans and metrics."""
    _, slots_LS = _slots(settings, now)
    return par_bound(make_problem(now.load_LE, len(now.servers), slots_LS, None, now.speeds_S))


def weigh(settings: Settings, now: Situation) -> Proposal:
    """Plan, and decide whether to adopt the plan, only new shares, or nothing. Rolls nothing out.

    Raises:
        ValueError: As `lay_out`.
    """
    load_LE, speeds_S = now.load_LE, now.speeds_S
    now_shares = now.shares_LSE.astype(np.float64)
    par_now_L = par(load_LE, now.holds_LSE, now_shares, speeds_S)
    cap_LS, _ = _slots(settings, now)
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
    if not now.holds_LSE.any(axis=1).all():
        kind, why = "moves", "there are experts without a server"
    elif (cross_node := _cross_node(settings, now, kept_LSE)) and moves:
        kind = "moves"
        why = f"a layer has {counted(cross_node, 'replica')} on other nodes: above the node budget"
    elif (together := _together(settings, now, holds_LSE)) and moves:
        kind = "moves"
        why = f"{counted(together, 'expert')} fewer with all replicas on one node"
    elif moves and gain >= least and payback_s <= HORIZON_S:
        kind, lower, pay = "moves", *(("lowers", "pays") if loads == 1 else ("lower", "pay"))
        why = f"{counted(loads, 'load')} {lower} the mean PAR by {gain:.3f}"
        why += f" and {pay} back in {payback_s:.1f} s"
    elif level_gain >= least:
        kind = "shares"
        why = f"other shares lower the mean PAR by {level_gain:.3f}"
        why += "; additional moves do not pay" if gain > 0 else ", moves no further"
    else:
        kind = "nothing"
        why = _no_reason(loads if moves else 0, gain, level_gain, least, payback_s)
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


def _no_reason(loads: int, gain: float, level_gain: float, least: float, payback_s: float) -> str:
    """Explain why nothing changes, for the history and an operator's answer."""
    shares = f"other shares would {_effect(level_gain)}"
    if not loads:
        return f"{shares}, and nothing would move: {_too_little(level_gain, least)}"
    why = f"{counted(loads, 'load')} would {_effect(gain)}, {shares}"
    if gain >= least:
        return f"{why}: the loads would pay back in {payback_s:.1f} s, too late"
    return f"{why}: {_too_little(max(gain, level_gain), least)}"


def _effect(gain: float) -> str:
    if abs(gain) < _SEEN:
        return "not change the mean PAR"
    return f"{'lower' if gain > 0 else 'raise'} the mean PAR by {abs(gain):.3f}"


def _too_little(gain: float, least: float) -> str:
    if gain < _SEEN:
        return "no gain"
    return f"less than {least:.3f} may be noise" if np.isfinite(least) else "no load was seen"


def _slots(settings: Settings, now: Situation) -> tuple[Int, Int]:
    """int64 (L, S) twice: each server's slots by its memory, and those of them that the policy may fill."""
    layers, servers, experts = now.holds_LSE.shape
    capacity_S = np.full(servers, layers * experts) if now.capacity_S is None else now.capacity_S
    # The remainder goes to the layers in turn, and within each layer to the servers in turn.
    turns_L = np.arange(layers)
    cap_LS = capacity_S // layers + (turns_L[:, None] < capacity_S % layers)
    cap_LS = np.minimum(cap_LS, experts).astype(np.int64)
    total = experts + settings.num_redundant_experts
    slots_LS = np.empty_like(cap_LS)
    for layer in range(layers):
        turn = layer * (total % servers)
        slots_LS[layer] = np.roll(deal(total, np.roll(cap_LS[layer], -turn)), turn)
    return cap_LS, slots_LS


def _knobs(settings: Settings, now: Situation) -> dict[str, Any]:
    """Return the policy's knobs: by the cluster (such as window and nodes), tuned, or an operator's."""
    parameters = inspect.signature(find(settings.policy)).parameters
    known = {
        "window_WLE": now.window_WLE,
        "expert_bytes": now.expert_bytes,
        "link_bytes_per_s": settings.link_bytes_per_s,
        "stall_s": settings.stall_s,
        "horizon_s": HORIZON_S,
        **settings.tuned,
    }
    if settings.node_budget is not None:
        check_node_budget(settings.policy)
        nodes_S = None
        if now.nodes_S is not None:
            nodes_S = Nodes.of(now.nodes_S.tolist()).node_S
        known |= {"nodes_S": nodes_S, "cross_node_replicas": settings.node_budget}
    given = {name: value for name, value in known.items() if name in parameters}
    if settings.node_budget is None:
        given["nodes_S"] = now.nodes_S
    return given | dict(settings.knobs)


def check_node_budget(policy: str) -> None:
    """Raise ValueError for a policy that does not support a node budget, at start and in `SetPolicy`."""
    if "nodes_S" not in inspect.signature(find(policy)).parameters:
        raise ValueError(
            f"balancer.node_budget is set, and {policy} knows no nodes: give {policies.DEFAULT_POLICY}"
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
    if settings.redundancy < 2 or now.nodes_S is None:
        return 0
    nodes = Nodes.of(now.nodes_S.tolist())
    before, then = (count_on_one_node(h, nodes, replicas=2) for h in (now.holds_LSE, then_LSE))
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
