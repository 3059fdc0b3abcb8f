"""Whether another placement is worth its moves. Pure functions of what is known.

    layout    who holds what, and what part of an expert's tokens each holder takes
    room      replicas that a server has memory for, over all layers
    gain      by how much the PAR falls, on the mean over layers. A layer is over when its last server is:
              at PAR 1.5 a horizon of service takes half as long again
    payback   seconds of service until what was gained is what the loads cost

Shape suffixes: L layers, S servers, E logical experts, W steps.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

import balancer.policies as policies
from balancer.live.backups import deal, primaries, with_backups, with_least_shares
from balancer.policies.bounds import par_bound
from balancer.policies.measure import par
from balancer.policies.moves import Move, ordered_moves
from balancer.policies.problem import make_problem
from balancer.policies.registry import find
from balancer.policies.split import split
from balancer.policies.types import Float, Holds, Int, Shares
from eaas.words import counted

__all__ = [
    "STATIC_POLICY",
    "Proposal",
    "Settings",
    "Situation",
    "check_node_budget",
    "lay_out",
    "planning_bound",
    "weigh",
]

STATIC_POLICY = "spread"
"""The policy that looks at no load: nothing moves by it but where servers come and go."""

_NO_LIMIT = np.int64(1) << 40
# A smaller change is 0.000 to people.
_SEEN = 0.0005


@dataclass(frozen=True)
class Settings:
    """What an operator wants of placements (`BalancerConfig`, and what was said since).

    Attributes:
        policy: Of `balancer.policies.names()`.
        redundancy: Servers that hold each expert, at least.
        num_redundant_experts: Replicas per layer that the policy may place beyond one of each expert.
        horizon_s: Seconds of service in which moves must pay back.
        least_gain: Gain below which nothing is done at all.
        link_bytes_per_s: At which servers load.
        stall_s: Seconds of service that a load costs beside its bytes.
        knobs: The policy's own, by name.
        tuned: The same, as they are set from the load; `knobs` come first.
        link_part: Of the link's rate, what is free for loads.
        node_budget: Replicas per layer that experts may have on further nodes than their first; backups
            do not count. None: any number.
        pins: (layer, expert, server): replicas that have to be there.
    """

    policy: str = STATIC_POLICY
    redundancy: int = 2
    num_redundant_experts: int = 0
    horizon_s: float = 600.0
    least_gain: float = 0.02
    link_bytes_per_s: float = 1e9
    stall_s: float = 0.0
    knobs: Mapping[str, Any] = field(default_factory=dict)
    tuned: Mapping[str, Any] = field(default_factory=dict)
    link_part: float = 1.0
    node_budget: int | None = None
    pins: frozenset[tuple[int, int, str]] = frozenset()

    @property
    def free_bytes_per_s(self) -> float:
        """At which servers load beside what else the links carry."""
        return self.link_bytes_per_s * self.link_part


@dataclass(frozen=True, eq=False)
class Situation:
    """What a layout is asked for.

    Attributes:
        servers: That there are to be.
        holds_LSE: bool; what they hold now. A new server holds nothing.
        shares_LSE: float; of the placement now.
        load_LE: float64; tokens of the window.
        speeds_S: float64, above 0.
        room_S: int64; replicas, over all layers. None: no limits.
        expert_bytes: Of a replica.
        window_WLE: The window itself, for policies that look at more than its sum; None: there is none.
        nodes_S: int64; which servers are near to one another. None: not known.
        away_LE: int64; replicas on servers that are to come back, and are none of these. None: there are
            none.
    """

    servers: tuple[str, ...]
    holds_LSE: Holds
    shares_LSE: npt.NDArray[np.floating]
    load_LE: Float
    speeds_S: Float
    room_S: Int | None = None
    expert_bytes: int = 0
    window_WLE: npt.NDArray[np.int64] | None = None
    nodes_S: Int | None = None
    away_LE: Int | None = None


@dataclass(frozen=True, eq=False)
class Proposal:
    """A layout, what it is worth, and whether it is better than what is.

    Attributes:
        kind: "nothing" is to be done, other "shares" of what is held are enough, or "moves" pay.
        reason: Why, for people.
        servers: Index S.
        holds_LSE, shares_LSE: The layout to go to; that of now where nothing is to be done.
        par_now_L, par_then_L: Under the window's load. Then: of the layout planned, be it taken or not.
        bound_L: No layout with these slots has a lower PAR.
        moves: The way to the layout that was planned, in order.
        bytes: To be loaded for it.
        gain: In mean PAR, against the best shares of what is held now.
        payback_s: inf where there is no gain.
        planned: The layout that was planned, be it taken or not.
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
        """Replicas to be loaded."""
        return sum(move.kind == "load" for move in self.moves)


def lay_out(settings: Settings, now: Situation) -> tuple[Holds, Shares]:
    """What the policy wants, with backups and pins.

    Raises:
        ValueError: Not every expert has room, or a knob is wrong; says what.
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
    # Not the policy's own shares: equal ones, or those of its forecast. Clients here can follow any, and
    # what is best for the window is what the next look at it will ask for.
    shares_LSE = best_shares(load_LE, primary_LSE, now.speeds_S)
    holds_LSE = with_backups(primary_LSE, now.holds_LSE, settings.redundancy, cap_LS, now.away_LE)
    return holds_LSE, with_least_shares(primary_LSE, holds_LSE, shares_LSE)


def best_shares(load_LE: Float, holds_LSE: Holds, speeds_S: Float) -> Shares:
    """float64 (L, S, E): those of the lowest PAR over this layout; even where an expert has no load."""
    replicas_LE = np.maximum(holds_LSE.sum(axis=1, keepdims=True), 1)
    even_LSE = holds_LSE / replicas_LE
    return np.stack(
        [
            split(load_E, even_SE, speeds_S)
            for load_E, even_SE in zip(load_LE, even_LSE, strict=True)
        ]
    )


def par_of(
    load_LE: Float, holds_LSE: Holds, shares_LSE: npt.NDArray[np.floating], speeds_S: Float
) -> Float:
    """float64 (L): PAR under these shares, however the arrays lie in memory."""
    shares = np.ascontiguousarray(shares_LSE, np.float64)
    return par(np.ascontiguousarray(load_LE), np.ascontiguousarray(holds_LSE), shares, speeds_S)


def planning_bound(settings: Settings, now: Situation) -> Float:
    """float64 (L): no layout with the policy's slots has a lower PAR."""
    _, slots_LS = _slots(settings, now)
    return par_bound(make_problem(now.load_LE, len(now.servers), slots_LS, None, now.speeds_S))


def weigh(settings: Settings, now: Situation) -> Proposal:
    """Plans, and says whether the plan, other shares alone, or nothing is best.

    Raises:
        ValueError: As `lay_out`.
    """
    load_LE, speeds_S = now.load_LE, now.speeds_S
    now_shares = now.shares_LSE.astype(np.float64)
    par_now_L = par_of(load_LE, now.holds_LSE, now_shares, speeds_S)
    cap_LS, _ = _slots(settings, now)
    # Step 1: what other shares can do. They move nothing.
    kept_LSE = primaries(now.holds_LSE, now.shares_LSE)
    level_LSE = with_least_shares(kept_LSE, now.holds_LSE, best_shares(load_LE, kept_LSE, speeds_S))
    par_level_L = par_of(load_LE, now.holds_LSE, level_LSE, speeds_S)
    # Step 2: what the policy can.
    holds_LSE, shares_LSE = lay_out(settings, now)
    par_then_L = par_of(load_LE, holds_LSE, shares_LSE, speeds_S)
    moves = ordered_moves(now.holds_LSE, holds_LSE, np.maximum(cap_LS, now.holds_LSE.sum(axis=2)))
    loads = int(np.count_nonzero(holds_LSE > now.holds_LSE))
    gain = float((par_level_L - par_then_L).mean())
    cost_s = loads * (now.expert_bytes / settings.free_bytes_per_s + settings.stall_s)
    payback_s = cost_s / gain if gain > 0 else np.inf
    # Step 3: which of them.
    least = max(settings.least_gain, _noise(now))
    level_gain = float((par_now_L - par_level_L).mean())
    if not now.holds_LSE.any(axis=1).all():
        kind, why = "moves", "there are experts without a server"
    elif (abroad := _abroad(settings, now, kept_LSE)) and moves:
        kind = "moves"
        why = f"a layer has {counted(abroad, 'replica')} on further nodes: more than may be"
    elif moves and gain >= least and payback_s <= settings.horizon_s:
        kind, lower, pay = "moves", *(("lowers", "pays") if loads == 1 else ("lower", "pay"))
        why = f"{counted(loads, 'load')} {lower} the mean PAR by {gain:.3f}"
        why += f" and {pay} back in {payback_s:.1f} s"
    elif level_gain >= least:
        kind = "shares"
        why = f"other shares lower the mean PAR by {level_gain:.3f}"
        why += "; moves beside them do not pay" if gain > 0 else ", moves no further"
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
    """Why nothing is done, for people."""
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
    """Replicas that servers may hold, and those of them that are the policy's: int64 (L, S) each."""
    layers, servers, experts = now.holds_LSE.shape
    room_S = np.full(servers, layers * experts) if now.room_S is None else now.room_S
    # Of what does not come out even the layers take turns, and in each of them the servers.
    turns_L = np.arange(layers)
    cap_LS = room_S // layers + (turns_L[:, None] < room_S % layers)
    cap_LS = np.minimum(cap_LS, experts).astype(np.int64)
    total = experts + settings.num_redundant_experts
    slots_LS = np.empty_like(cap_LS)
    for layer in range(layers):
        turn = layer * (total % servers)
        slots_LS[layer] = np.roll(deal(total, np.roll(cap_LS[layer], -turn)), turn)
    return cap_LS, slots_LS


def _knobs(settings: Settings, now: Situation) -> dict[str, Any]:
    """The policy's own, with what the cluster knows for it."""
    parameters = inspect.signature(find(settings.policy)).parameters
    known = {
        "window_WLE": now.window_WLE,
        "expert_bytes": now.expert_bytes,
        "link_bytes_per_s": settings.free_bytes_per_s,
        "stall_s": settings.stall_s,
        "horizon_s": settings.horizon_s,
        **settings.tuned,
    }
    if settings.node_budget is not None:
        check_node_budget(settings.policy)
        known |= {"nodes_S": now.nodes_S, "cross_node_replicas": settings.node_budget}
    given = {name: value for name, value in known.items() if name in parameters}
    return given | dict(settings.knobs)


def check_node_budget(policy: str) -> None:
    """Raises ValueError for a policy that knows no nodes."""
    able = [p for p in policies.names() if "nodes_S" in inspect.signature(find(p)).parameters]
    if policy not in able:
        raise ValueError(
            f"balancer.node_budget is set, and {policy} knows no nodes: give {' or '.join(able)}"
        )


def _abroad(settings: Settings, now: Situation, primary_LSE: Holds) -> int:
    """The most replicas of a layer on further nodes, where that is above the budget; else 0."""
    if settings.node_budget is None or now.nodes_S is None:
        return 0
    held_NLE = [primary_LSE[:, now.nodes_S == node].any(axis=1) for node in np.unique(now.nodes_S)]
    further_L = (np.sum(held_NLE, axis=0) - 1).clip(0).sum(axis=1)
    return int(further_L.max()) if further_L.max() > settings.node_budget else 0


def _noise(now: Situation) -> float:
    """By how much the PAR of so few tokens differs from that of their distribution; mean over layers.

    A server's load is a count of n / S tokens, so its relative deviation is sqrt(S / n) at most; twice that.
    """
    tokens_L = now.load_LE.sum(axis=1)
    known_L = tokens_L[tokens_L > 0]
    if not known_L.size:
        return float("inf")
    return float(2 * np.sqrt(len(now.servers) / known_L).mean())
