"""Turns the balancer's Plan requests into settings and situations, and plans into responses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from balancer.live.cost_benefit import Settings, Situation
from balancer.live.plans import VERDICTS, Planned
from balancer.live.state import LoadState
from balancer.policies.anti_affinity import Nodes, count_on_one_node
from balancer.policies.measure import par
from balancer.policies.registry import checked_knobs
from balancer.policies.types import Float
from eaas.counted import counted
from eaas.rpc.v1 import balancer_pb2 as pb
from eaas.types import Placement

# A plan for more servers would take all memory and the balancer's time.
_MOST_SERVERS = 1024

__all__ = ["answer_of", "current_situation", "knobs_of", "settings_of", "situation_of"]


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
    request: pb.PlanRequest, placement: Placement, load: LoadState | None
) -> tuple[Situation, Float] | None:
    """Build the hypothetical cluster that a Plan request asks about.

    Returns:
        Its situation, and the current placement's PAR (L) under the same loads and speeds. None if the
        request is about the cluster as it is.

    Raises:
        ValueError: Unknown servers, or loads of the wrong shape.
    """
    asked = request.more_servers or request.without_servers or request.loads or request.speeds
    if not asked:
        return None
    for name in (*request.without_servers, *request.speeds):
        if name not in placement.servers:
            raise ValueError(f"{name!r} is no server of the placement")
    now = current_situation(placement, load, _loads(request, placement))
    speeds_S = np.array(
        [request.speeds.get(s, v) for s, v in zip(now.servers, now.speeds_S, strict=True)]
    )
    if not (speeds_S.min() > 0 and speeds_S.max() < np.inf):
        raise ValueError("speeds must be above 0")
    now = replace(now, speeds_S=speeds_S)
    par_L = par(now.load_LE, now.holds_LSE, now.shares_LSE, speeds_S)
    return _other_servers(now, request), par_L


def _other_servers(now: Situation, request: pb.PlanRequest) -> Situation:
    kept = [i for i, s in enumerate(now.servers) if s not in request.without_servers]
    more = request.more_servers
    if more > _MOST_SERVERS:
        raise ValueError(f"{counted(more, 'server')} more: {_MOST_SERVERS} at most")
    if not kept and not more:
        raise ValueError("no server is left")
    layers, _, experts = now.holds_LSE.shape
    shape = (layers, more, experts)
    capacity_S = None
    if now.capacity_S is not None:
        capacity_S = np.append(now.capacity_S[kept], np.full(more, now.capacity_S.min()))
    nodes_S = None
    if now.nodes_S is not None:
        # The request does not name nodes: each new server gets its own.
        new = [f"new-{n + 1}" for n in range(more)]
        nodes_S = np.array([*now.nodes_S[kept].tolist(), *new], np.str_)
    return replace(
        now,
        servers=(*(now.servers[i] for i in kept), *(f"new-{n + 1}" for n in range(more))),
        holds_LSE=np.concatenate([now.holds_LSE[:, kept], np.zeros(shape, np.bool_)], axis=1),
        shares_LSE=np.concatenate([now.shares_LSE[:, kept], np.zeros(shape)], axis=1),
        speeds_S=np.append(now.speeds_S[kept], np.ones(more)),
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


def current_situation(
    placement: Placement, load: LoadState | None, load_LE: Float | None = None
) -> Situation:
    """Build the situation of a placement, under given loads or the observed ones (0 if unknown)."""
    servers, holds_LSE = placement.servers, placement.holds_LSE
    shares_LSE = placement.shares_LSE
    if load is not None:
        return load.situation(servers, holds_LSE, shares_LSE, load_LE)
    if load_LE is None:
        load_LE = np.zeros((holds_LSE.shape[0], holds_LSE.shape[2]))
    return Situation(servers, holds_LSE, shares_LSE, load_LE, np.ones(len(servers)))


def answer_of(planned: Planned) -> pb.PlanResponse:
    """Convert a plan to the PlanResponse that the operator gets."""
    proposal = planned.proposal
    par_now, par_then = float(proposal.par_now_L.mean()), float(proposal.par_then_L.mean())
    bound = float(proposal.bound_L.mean())
    layers = zip(proposal.par_now_L, proposal.par_then_L, proposal.bound_L, strict=True)
    shares_LSE = proposal.shares_LSE.astype(np.float32)
    nodes_S = planned.situation.nodes_S
    on_one_node = None
    if nodes_S is not None:
        on_one_node = count_on_one_node(proposal.holds_LSE, Nodes.of(nodes_S.tolist()))
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
