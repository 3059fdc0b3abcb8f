"""The balancer's gRPC calls that decide where experts are placed, on its gRPC threads (`balancer.proto`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

import grpc
import numpy as np

from balancer.live.plans import NotNowError, PlannerSnapshot
from balancer.live.rebalancer import Rebalancer
from balancer.live.requests import (
    answer_of,
    checked,
    knobs_of,
    settings_of,
    situation_of,
    with_replica,
    without_replica,
)
from balancer.persistence.idempotency import IdempotencyCache, RequestIdTakenError
from balancer.planner.layout import STATIC_POLICY, Situation, check_node_budget
from eaas.rpc.v1 import balancer_pb2 as pb
from eaas.rpc.v1 import common_pb2
from eaas.types import Placement

__all__ = ["PlanCalls"]

_Code = grpc.StatusCode


class _NotFoundError(Exception):
    """A plan, server or replica that the request names does not exist."""


@contextmanager
def _errors(context: Any) -> Iterator[None]:
    """End a call that raised an error with the gRPC status code that `balancer.proto` promises."""
    try:
        yield
    except NotNowError as error:
        context.abort(_Code.FAILED_PRECONDITION, str(error))
    except _NotFoundError as error:
        context.abort(_Code.NOT_FOUND, str(error))
    except RequestIdTakenError as error:
        context.abort(_Code.ALREADY_EXISTS, str(error))
    except ValueError as error:
        context.abort(_Code.INVALID_ARGUMENT, str(error))
    except TimeoutError:
        context.abort(_Code.UNAVAILABLE, "the balancer is busy or closing: ask again")


def _changing(work: Callable[[PlanCalls, Any], Any]) -> Callable[[PlanCalls, Any, Any], Any]:
    """Make a gRPC method of a function that changes something: a repeated request gets the first answer."""
    response_type = getattr(pb, f"{work.__name__}Response")

    @wraps(work)
    def call(calls: PlanCalls, request: Any, context: Any) -> Any:
        with _errors(context):
            return calls.idempotency.run(request, response_type, lambda: work(calls, request))

    return call


class PlanCalls:
    """The part of BalancerService for plans, constraints, hotness and history. Thread-safe.

    Args:
        rebalancer: Plans and rolls out.
        idempotency: Caches answers to calls that change something.
        step_s: Seconds between two readings of the load.
    """

    def __init__(
        self, rebalancer: Rebalancer, idempotency: IdempotencyCache, step_s: float
    ) -> None:
        self._rebalancer = rebalancer
        self.idempotency = idempotency
        self._step_s = step_s

    # -- plans --------------------------------------------------------------------------------------

    def Plan(self, request: pb.PlanRequest, context: Any) -> pb.PlanResponse:
        """Answer with a plan for this cluster or a hypothetical one; change nothing. `Apply` takes its id."""
        with _errors(context):
            now, placement = self._now()
            settings = settings_of(request, self._rebalancer.settings)
            other = situation_of(request, placement, self._rebalancer.load)
            if other is None:
                return answer_of(self._rebalancer.plan(settings, now))
            situation, par_L = other
            planned = self._rebalancer.plan(settings, now, situation)
            return answer_of(replace(planned, proposal=replace(planned.proposal, par_now_L=par_L)))

    @_changing
    def Apply(self, request: pb.ApplyRequest) -> pb.ApplyResponse:
        """Begin the roll-out of an earlier plan or an operator's placement; answer before servers load it."""
        now, placement = self._now()
        if request.WhichOneof("what") == "placement":
            _check_size(request.placement, placement)
            wanted = checked(Placement.from_proto(request.placement))
            for server in wanted.servers:
                if server not in now.able:
                    raise ValueError(f"{server!r} is no server that can be given experts")
            stages = self._rebalancer.place(wanted, "an operator's placement", placement)
            return pb.ApplyResponse(epoch=placement.epoch, stages=stages)
        planned = self._rebalancer.find(request.plan_id)
        if planned is None:
            raise _NotFoundError(f"no plan {request.plan_id!r}: plan again")
        return pb.ApplyResponse(epoch=placement.epoch, stages=self._rebalancer.apply(planned))

    @_changing
    def Rebalance(self, request: pb.RebalanceRequest) -> pb.RebalanceResponse:
        """Plan now, and begin the plan's roll-out if it pays or is forced; else record only the decision."""
        if request.policy:
            knobs_of(request.policy, {})
        planned, stages = self._rebalancer.rebalance(request.policy, force=request.force)
        return pb.RebalanceResponse(plan=answer_of(planned), applied=bool(stages))

    # -- constraints --------------------------------------------------------------------------------

    @_changing
    def SetPolicy(self, request: pb.SetPolicyRequest) -> pb.SetPolicyResponse:
        """Set the policy and its knobs for later plans; `spread` also lets repair even replicas out."""
        before = self._rebalancer.settings.policy
        knobs = knobs_of(request.policy, request.knobs)
        if self._rebalancer.settings.node_budget is not None:
            check_node_budget(request.policy)
        self._rebalancer.change(policy=request.policy, knobs=knobs)
        if request.policy == STATIC_POLICY:
            self._rebalancer.level()
        return pb.SetPolicyResponse(policy=before)

    @_changing
    def PinExpert(self, request: pb.PinExpertRequest) -> pb.PinExpertResponse:
        """Require a replica in later placements, and begin to load it if its server lacks it."""
        self._pin(request.layer, request.expert, request.server_id)
        return pb.PinExpertResponse()

    @_changing
    def UnpinExpert(self, request: pb.UnpinExpertRequest) -> pb.UnpinExpertResponse:
        """Drop the pin of a replica, which stays until a later placement leaves it out."""
        pin = (request.layer, request.expert, request.server_id)
        pins = self._rebalancer.settings.pins
        if pin not in pins:
            raise _NotFoundError(
                f"expert {request.expert} of layer {request.layer} is not pinned to "
                f"{request.server_id!r}"
            )
        self._rebalancer.change(pins=pins - {pin})
        return pb.UnpinExpertResponse()

    @_changing
    def AddReplica(self, request: pb.AddReplicaRequest) -> pb.AddReplicaResponse:
        """Pin a replica, on the least loaded server without it if none is named, and begin to load it."""
        server = self._pin(request.layer, request.expert, request.server_id)
        return pb.AddReplicaResponse(server_id=server)

    @_changing
    def RemoveReplica(self, request: pb.RemoveReplicaRequest) -> pb.RemoveReplicaResponse:
        """Begin the roll-out of a placement without this replica, and drop its pin.

        Refused if fewer servers than the redundancy would hold the expert.
        """
        layer, expert, server = request.layer, request.expert, request.server_id
        _, placement = self._now()
        _check(placement, layer, expert)
        if server not in placement.servers:
            raise _NotFoundError(f"{server!r} is no server of the placement")
        if not placement.holds_LSE[layer, placement.servers.index(server), expert]:
            raise _NotFoundError(f"{server} has no expert {expert} of layer {layer}")
        settings = self._rebalancer.settings
        try:
            candidate = without_replica(settings, self._situation(placement), layer, expert, server)
        except ValueError as error:
            raise NotNowError(str(error)) from error
        self._rebalancer.place(candidate, f"layer {layer}, expert {expert} off {server}", placement)
        if (pin := (layer, expert, server)) in settings.pins:
            self._rebalancer.change(pins=settings.pins - {pin})
        return pb.RemoveReplicaResponse()

    def _pin(self, layer: int, expert: int, server: str) -> str:
        """Pin a replica, loaded if missing; return its server (the least loaded one if none is named)."""
        now, placement = self._now()
        _check(placement, layer, expert)
        situation = self._situation(placement)
        if not server:
            server = _least_loaded(situation, layer, expert)
        if server not in now.able or server not in placement.servers:
            raise _NotFoundError(f"{server!r} is no live server of the placement")
        settings = self._rebalancer.settings
        if not placement.holds_LSE[layer, placement.servers.index(server), expert]:
            try:
                candidate = with_replica(settings, situation, layer, expert, server)
            except ValueError as error:
                raise NotNowError(str(error)) from error
            self._rebalancer.place(
                candidate, f"layer {layer}, expert {expert} on {server}", placement
            )
        self._rebalancer.change(pins=settings.pins | {(layer, expert, server)})
        return server

    # -- observations -------------------------------------------------------------------------------

    def GetHotness(self, request: pb.GetHotnessRequest, context: Any) -> pb.GetHotnessResponse:
        """Return the window's tokens by expert and by server, with servers' speeds and the layers' PAR."""
        with _errors(context):
            _, placement = self._now()
            seen = self._rebalancer.load.observed(placement.servers)
            if seen is None:
                return pb.GetHotnessResponse(step_s=self._step_s)
            return pb.GetHotnessResponse(
                steps=seen.steps,
                step_s=self._step_s,
                layers=[common_pb2.LayerTokens(tokens=row) for row in seen.tokens_LE.tolist()],
                servers=[
                    pb.ServerHotness(
                        server_id=server,
                        tokens=seen.load_LS[:, s].astype(np.int64).tolist(),
                        speed=float(seen.speeds_S[s]),
                    )
                    for s, server in enumerate(placement.servers)
                ],
                par=seen.par_L.tolist(),
            )

    def History(self, request: pb.HistoryRequest, context: Any) -> pb.HistoryResponse:
        """Return past placement decisions with their roll-outs' outcomes, the newest first."""
        return pb.HistoryResponse(entries=self._rebalancer.history.entries(request.limit))

    # -- shared -------------------------------------------------------------------------------------

    def _now(self) -> tuple[PlannerSnapshot, Placement]:
        now = self._rebalancer.snapshot()
        if now.placement is None:
            raise NotNowError("there is no placement yet")
        return now, now.placement

    def _situation(self, placement: Placement) -> Situation:
        load = self._rebalancer.load
        return load.situation(placement.servers, placement.holds_LSE, placement.shares_LSE)


def _check_size(wanted: common_pb2.Placement, placement: Placement) -> None:
    layers, _, experts = placement.holds_LSE.shape
    if (wanted.num_layers, wanted.num_experts) != (layers, experts):
        raise ValueError(
            f"the placement has {wanted.num_layers} layers of {wanted.num_experts} experts, "
            f"the model has {layers} of {experts}"
        )


def _check(placement: Placement, layer: int, expert: int) -> None:
    layers, _, experts = placement.holds_LSE.shape
    if layer >= layers or expert >= experts:
        raise ValueError(
            f"layer {layer}, expert {expert}: the model has {layers} MoE layers of {experts} experts"
        )


def _least_loaded(now: Situation, layer: int, expert: int) -> str:
    """Return the least loaded server without this expert, for a new replica; on another node if possible.

    Raises NotNowError if every server has the expert.
    """
    free_S = ~now.holds_LSE[layer, :, expert]
    if not free_S.any():
        raise NotNowError(f"every server has expert {expert} of layer {layer}")
    load_S = (now.shares_LSE[layer] * now.load_LE[layer]).sum(axis=1) / now.speeds_S
    held_S = now.holds_LSE[layer].sum(axis=1)
    # Other nodes first.
    taken_S = np.zeros(len(now.servers), np.bool_)
    if now.nodes_S is not None:
        taken_S = np.isin(now.nodes_S, now.nodes_S[~free_S])
    order = np.lexsort((held_S, load_S, taken_S))
    return str(now.servers[next(s for s in order if free_S[s])])
