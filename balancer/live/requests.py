"""Turns operators' requests into settings, situations and placements, and plans into answers. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from balancer.live.plans import VERDICTS, Planned
from balancer.live.state import LoadState
from balancer.planner.backups import primaries, with_least_shares
from balancer.planner.candidates import Candidate
from balancer.planner.layout import STATIC_POLICY, Settings, Situation, best_shares
from balancer.policies.anti_affinity import count_on_one_node
from balancer.policies.measure import par
from balancer.policies.registry import checked_knobs
from balancer.policies.repair import even_shares
from balancer.policies.types import Float, Holds
from eaas.counted import counted
from eaas.rpc.v1 import balancer_pb2 as pb
from eaas.types import Placement

__all__ = [
    "answer_of",
    "checked",
    "knobs_of",
    "settings_of",
    "situation_of",
    "with_replica",
    "without_replica",
]

# A plan for more servers would take all memory and the balancer's time.
_MOST_SERVERS = 1024
_LEAST_SUM = 1e-3


def knobs_of(policy: str, given: Mapping[str, float]) -> dict[str, Any]:
    """Return an operator's knobs for a policy, checked. Raises ValueError for an unknown policy or knob."""
    whole = {name: int(v) if float(v).is_integer() else v for name, v in given.items()}
    return checked_knobs(policy, whole)


def settings_of(request: pb.PlanRequest, now: Settings) -> Settings:
    """Return the current settings with a Plan request's overrides, for this plan only.

    Raises ValueError for a wrong override.
    """
    policy = request.policy or now.policy
    knobs = knobs_of(policy, request.knobs)
    if policy == now.policy:
        knobs = {**now.knobs, **knobs}
    settings = replace(now, policy=policy, knobs=knobs)
    if request.HasField("redundancy"):
        if not request.redundancy:
            raise ValueError("redundancy is 0: each expert needs at least 1 server")
        settings = replace(settings, redundancy=request.redundancy)
    if request.HasField("num_redundant_experts"):
        settings = replace(settings, num_redundant_experts=request.num_redundant_experts)
    return settings


def situation_of(
    request: pb.PlanRequest, placement: Placement, load: LoadState
) -> tuple[Situation, Float] | None:
    """Build the hypothetical cluster that a Plan request asks about.

    Returns:
        Its situation, and the current placement's PAR (L) under the same loads and speeds. None if the
        request is about the cluster as it is.

    Raises:
        ValueError: Unknown servers, or loads of the wrong shape.
    """
    if not (request.more_servers or request.without_servers or request.loads or request.speeds):
        return None
    for name in (*request.without_servers, *request.speeds):
        if name not in placement.servers:
            raise ValueError(f"{name!r} is no server of the placement")
    now = load.situation(
        placement.servers, placement.holds_LSE, placement.shares_LSE, _loads(request, placement)
    )
    speeds_S = np.array(
        [request.speeds.get(s, v) for s, v in zip(now.servers, now.speeds_S, strict=True)]
    )
    if not (speeds_S.min() > 0 and speeds_S.max() < np.inf):
        raise ValueError("speeds must be above 0")
    now = replace(now, speeds_S=speeds_S)
    par_L = par(now.load_LE, now.holds_LSE, now.shares_LSE, speeds_S)
    return _other_servers(now, request), par_L


def _other_servers(now: Situation, request: pb.PlanRequest) -> Situation:
    left = [i for i, s in enumerate(now.servers) if s not in request.without_servers]
    more = request.more_servers
    if more > _MOST_SERVERS:
        raise ValueError(f"{counted(more, 'server')} more: {_MOST_SERVERS} at most")
    if not left and not more:
        raise ValueError("no server is left")
    layers, _, experts = now.holds_LSE.shape
    shape = (layers, more, experts)
    capacity_S = None
    if now.capacity_S is not None:
        capacity_S = np.append(now.capacity_S[left], np.full(more, now.capacity_S.min()))
    nodes_S = None
    if now.nodes_S is not None:
        # The request does not name nodes: each new server gets its own.
        new = [f"new-{n + 1}" for n in range(more)]
        nodes_S = np.array([*now.nodes_S[left].tolist(), *new], np.str_)
    return replace(
        now,
        servers=(*(now.servers[i] for i in left), *(f"new-{n + 1}" for n in range(more))),
        holds_LSE=np.concatenate([now.holds_LSE[:, left], np.zeros(shape, np.bool_)], axis=1),
        shares_LSE=np.concatenate([now.shares_LSE[:, left], np.zeros(shape)], axis=1),
        speeds_S=np.append(now.speeds_S[left], np.ones(more)),
        capacity_S=capacity_S,
        nodes_S=nodes_S,
    )


def _loads(request: pb.PlanRequest, placement: Placement) -> Float | None:
    if not request.loads:
        return None
    layers, _, experts = placement.holds_LSE.shape
    lengths = {len(layer.tokens) for layer in request.loads}
    if len(request.loads) != layers or lengths != {experts}:
        raise ValueError(f"loads are wanted for {layers} layers of {experts} experts each")
    return np.array([layer.tokens for layer in request.loads], np.float64)


def answer_of(planned: Planned) -> pb.PlanResponse:
    """Convert a plan to the PlanResponse that the operator gets."""
    proposal = planned.proposal
    par_now, par_then = float(proposal.par_now_L.mean()), float(proposal.par_then_L.mean())
    bound = float(proposal.bound_L.mean())
    layers = zip(proposal.par_now_L, proposal.par_then_L, proposal.bound_L, strict=True)
    shares_LSE = proposal.shares_LSE.astype(np.float32)
    nodes = planned.situation.nodes
    on_one_node = None if nodes is None else count_on_one_node(proposal.holds_LSE, nodes)
    placement = Placement(0, proposal.servers, proposal.holds_LSE, shares_LSE)
    return pb.PlanResponse(
        plan_id=planned.id,
        epoch=planned.placement.epoch,
        policy=planned.settings.policy,
        verdict=VERDICTS[proposal.kind],
        reason=proposal.reason,
        par_now=par_now,
        par_then=par_then,
        bound=bound,
        gap=par_then / bound,
        layers=[
            pb.LayerPlan(par_now=now, par_then=then, bound=least) for now, then, least in layers
        ],
        transit=proposal.transit,
        bytes=proposal.bytes,
        moves=[
            pb.Move(
                layer=move.layer,
                expert=move.expert,
                server_id=proposal.servers[move.server],
                unload=move.kind == "unload",
            )
            for move in proposal.moves
        ],
        gain=max(0.0, proposal.gain),
        payback_s=proposal.payback_s,
        placement=placement.to_proto(),
        applicable=planned.applicable,
        experts_on_one_node=on_one_node,
        survives_node_loss=on_one_node == 0,
    )


# -- edits of a placement -----------------------------------------------------------------------


def with_replica(
    settings: Settings, now: Situation, layer: int, expert: int, server: str
) -> Candidate:
    """Return the placement with one more replica, which counts as a primary.

    Raises ValueError if the server has no memory for it.
    """
    s = now.servers.index(server)
    if now.capacity_S is not None and now.holds_LSE[:, s].sum() >= now.capacity_S[s]:
        raise ValueError(f"{server} has no memory for another replica")
    holds_LSE, primary_LSE = now.holds_LSE.copy(), primaries(now.holds_LSE, now.shares_LSE)
    holds_LSE[layer, s, expert] = primary_LSE[layer, s, expert] = True
    return _candidate(settings, now, holds_LSE, primary_LSE)


def without_replica(
    settings: Settings, now: Situation, layer: int, expert: int, server: str
) -> Candidate:
    """Return the placement without a replica; others take its share.

    Raises ValueError if fewer than the redundancy remain, or if the others share one node and need not.
    """
    s = now.servers.index(server)
    left = int(now.holds_LSE[layer, :, expert].sum()) - 1
    if left < min(settings.redundancy, len(now.servers)):
        raise ValueError(
            f"expert {expert} of layer {layer} would be on {counted(left, 'server')}, "
            f"balancer.redundancy is {settings.redundancy}"
        )
    holders_S = now.holds_LSE[layer, :, expert].copy()
    holders_S[s] = False
    if left > 1 and now.nodes_S is not None:
        nodes = set(now.nodes_S[holders_S].tolist())
        if len(nodes) == 1 and now.nodes_S[s] not in nodes:
            raise ValueError(
                f"expert {expert} of layer {layer} would be on one node only, {nodes.pop()}"
            )
    holds_LSE = now.holds_LSE.copy()
    holds_LSE[layer, s, expert] = False
    shares_LSE = np.where(holds_LSE, now.shares_LSE, 0.0)
    return _candidate(settings, now, holds_LSE, primaries(holds_LSE, shares_LSE))


def _candidate(
    settings: Settings, now: Situation, holds_LSE: Holds, primary_LSE: Holds
) -> Candidate:
    if settings.policy == STATIC_POLICY or not now.load_LE.any():
        return Candidate(now.servers, holds_LSE, even_shares(holds_LSE))
    shares_LSE = best_shares(now.load_LE, primary_LSE, now.speeds_S)
    return Candidate(now.servers, holds_LSE, with_least_shares(primary_LSE, holds_LSE, shares_LSE))


def checked(wanted: Placement) -> Candidate:
    """Turn an operator's placement into a candidate. Raises ValueError if clients could not follow it."""
    holds_LSE, shares_LSE = wanted.holds_LSE, wanted.shares_LSE
    if len(set(wanted.servers)) != len(wanted.servers):
        raise ValueError("the placement names a server twice")
    missing = np.argwhere(~holds_LSE.any(axis=1))
    if len(missing):
        layer, expert = missing[0]
        raise ValueError(f"layer {layer}, expert {expert} has no server ({len(missing)} such)")
    if not (np.isfinite(shares_LSE) & ((shares_LSE > 0) == holds_LSE)).all():
        raise ValueError("shares must be above 0 for each replica")
    wrong = np.argwhere(np.abs(shares_LSE.sum(axis=1) - 1) > _LEAST_SUM)
    if len(wrong):
        layer, expert = wrong[0]
        raise ValueError(f"the shares of layer {layer}, expert {expert} do not sum to 1")
    return Candidate(wanted.servers, holds_LSE, shares_LSE)
