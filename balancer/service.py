"""gRPC service of the balancer: placements for clients, scaling and draining for operators."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from balancer.live.rebalancer import Rebalancer
from balancer.persistence.idempotency import IdempotencyCache
from balancer.plan_calls import PlanCalls
from balancer.planner.planner import Planner
from eaas.counted import counted
from eaas.net.authorisation import OPERATOR
from eaas.net.grpc_client import STREAM_SIGN_S, channel
from eaas.net.tls import Identity
from eaas.rpc.v1 import balancer_pb2 as pb
from eaas.rpc.v1 import common_pb2, expert_pb2, expert_pb2_grpc
from eaas.spares import SpareReplicas
from eaas.types import Member, Placement, Role

__all__ = ["ROLES", "BalancerService"]

# Methods that change something, which only operators and their programs may call.
_CHANGES = ("Apply", "Rebalance", "SetPolicy", "PinExpert", "UnpinExpert", "AddReplica")
ROLES = dict.fromkeys(
    (*_CHANGES, "RemoveReplica", "DrainServer", "Scale", "RefuseScale"), (OPERATOR,)
)
"""Roles that may call each method."""

_DRAIN_S = 5.0


class BalancerService(PlanCalls):
    """Serves clients the last published placement, and operators' and launchers' calls. Thread-safe.

    Args:
        ask: Runs a function of the planner on the planner's thread.
        rebalancer: Decides where experts are placed.
        idempotency: Caches answers to calls that change something.
        step_s: Seconds between two readings of the load.
        most_servers: Highest number of servers that a caller may ask for.
        tls: This process's identity; None: plain text.
        dead_grace_s: How long the planner waits for a dead server; part of GetPlacement's answer.
    """

    def __init__(
        self,
        ask: Callable[[Callable[[Planner], Any]], Any],
        rebalancer: Rebalancer,
        idempotency: IdempotencyCache,
        step_s: float,
        most_servers: int,
        tls: Identity | None = None,
        dead_grace_s: float = 0.0,
    ) -> None:
        self._tls = tls
        self._dead_grace_s = dead_grace_s
        self._most_servers = most_servers
        super().__init__(rebalancer, idempotency, step_s)
        self._ask = ask
        self._changed = threading.Condition()
        self._placement = common_pb2.Placement()
        # A new stream is sent the spare replicas even if there are none: those of a former balancer are void.
        self._spares, self._spares_sent = common_pb2.SpareReplicas(), 1
        self._wanted_servers = 0
        # Number of the last request to scale. A repeated request for as many servers gets a new number.
        self._scale_wish = 0
        # The launcher's reason for giving up the last request; empty: it did not.
        self._scale_refusal = ""
        self._scalers = 0
        self._closed = False

    @property
    def epoch(self) -> int:
        """Epoch of the placement that clients are given; 0: none yet. Reported to the monitor."""
        return int(self._placement.epoch)

    def publish(self, placement: Placement) -> None:
        """Serve a newly published placement, and send it to the watching clients.

        Called on the planner's thread.
        """
        message = placement.to_proto()
        with self._changed:
            self._placement = message
            self._changed.notify_all()

    def publish_spares(self, spares: SpareReplicas) -> None:
        """Send the replicas in spare slots to the watching clients. Called on the slots' thread."""
        with self._changed:
            self._spares = spares.to_proto(self._placement.num_layers)
            self._spares_sent += 1
            self._changed.notify_all()

    def close(self) -> None:
        """End the streams of watching clients and launchers, which then look for another balancer."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # -- placements -----------------------------------------------------------------------------

    def GetPlacement(
        self, request: pb.GetPlacementRequest, context: Any
    ) -> pb.GetPlacementResponse:
        """Answer with the current placement and the grace for dead servers; epoch 0: none yet."""
        return pb.GetPlacementResponse(placement=self._placement, dead_grace_s=self._dead_grace_s)

    def WatchPlacement(
        self, request: pb.WatchPlacementRequest, context: Any
    ) -> Iterator[pb.WatchPlacementResponse]:
        """Stream each placement newer than the caller's to a client, and each change of spare replicas.

        Keep-alives are sent in between.
        """
        if not context.add_callback(self._wake):
            return
        known = request.known_epoch, 0
        while self._wait(context, self._has_news, known):
            epoch, sent = known
            with self._changed:
                placement, spares = self._placement, self._spares
                known = max(epoch, placement.epoch), self._spares_sent
            yield pb.WatchPlacementResponse(
                placement=placement if placement.epoch > epoch else None,
                epoch=placement.epoch,
                spares=spares if sent != known[1] else None,
            )

    def _has_news(self, known: tuple[int, int]) -> bool:
        return self._placement.epoch > known[0] or self._spares_sent != known[1]

    # -- servers join and leave -----------------------------------------------------------------

    def DrainServer(self, request: pb.DrainServerRequest, context: Any) -> pb.DrainServerResponse:
        """Tell an expert server to leave, if others can take its experts (errors: `balancer.proto`).

        The planner moves its experts once it reports that it drains.
        """
        server_id = request.server_id
        member, refusal = self._ask(lambda p: _cordon(p, server_id))
        if member is None:
            context.abort(
                grpc.StatusCode.NOT_FOUND, f"{server_id!r} is no live expert server of this cluster"
            )
        if refusal:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, refusal)
        with channel(member.address, Role.EXPERT_SERVER.value, self._tls) as opened:
            try:
                stub = expert_pb2_grpc.ExpertServiceStub(opened)
                stub.Drain(expert_pb2.DrainRequest(), timeout=_DRAIN_S)
            except grpc.RpcError as error:
                self._ask(lambda planner: planner.pool.uncordon(server_id))
                why = f"{server_id} does not answer: {error.code().name}: {error.details()}"
                context.abort(grpc.StatusCode.UNAVAILABLE, why)
        return pb.DrainServerResponse()

    def Scale(self, request: pb.ScaleRequest, context: Any) -> pb.ScaleResponse:
        """Pass the number of servers that an operator or the autoscaler wants to the watching launchers.

        They start further servers, or drain the last ones; the balancer starts none.
        """
        refusal = self._why_not(request.servers, self._ask(lambda planner: planner.fewest_servers))
        if refusal:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, refusal)
        with self._changed:
            if not self._scalers:
                context.abort(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    "nobody starts servers for this cluster: start `eaas expert-server --join` by hand, "
                    "or end one with `eaas drain`",
                )
            self._wanted_servers = request.servers
            self._scale_wish += 1
            self._scale_refusal = ""
            self._changed.notify_all()
            return pb.ScaleResponse(wish=self._scale_wish)

    def _why_not(self, servers: int, fewest: int) -> str:
        """Return why `Scale` refuses this many servers; empty: it does not."""
        if servers < 1:
            return "0 servers would hold no experts: give at least 1, or stop the cluster"
        if servers < fewest:
            return (
                f"{counted(servers, 'server')} cannot hold each expert on {fewest}, as balancer.redundancy "
                f"wants: give at least {fewest}, or start the cluster with a lower --redundancy"
            )
        if servers > self._most_servers:
            return (
                f"{counted(servers, 'server')}: balancer.max_servers allows {self._most_servers} at most; "
                "give fewer, or raise that setting"
            )
        return ""

    def GetScale(self, request: pb.GetScaleRequest, context: Any) -> pb.GetScaleResponse:
        """Return the limits of `Scale`, and the last request with a launcher's reason for giving it up."""
        fewest = self._ask(lambda planner: planner.fewest_servers)
        with self._changed:
            return pb.GetScaleResponse(
                fewest=fewest,
                most=self._most_servers,
                wish=self._scale_wish,
                refusal=self._scale_refusal,
            )

    def RefuseScale(self, request: pb.RefuseScaleRequest, context: Any) -> pb.RefuseScaleResponse:
        """Record why a launcher gives up the last request to scale; `GetScale` returns the reason."""
        with self._changed:
            if request.wish == self._scale_wish:
                self._scale_refusal = request.reason or "the launcher gives no reason"
        return pb.RefuseScaleResponse()

    def WatchScale(
        self, request: pb.WatchScaleRequest, context: Any
    ) -> Iterator[pb.WatchScaleResponse]:
        """Stream each new request to scale to a launcher. `Scale` is refused while no launcher watches."""
        if not context.add_callback(self._wake):
            return
        known = request.known_wish
        with self._changed:
            self._scalers += 1
        try:
            # Answer at once, to confirm to the caller that it is registered.
            yield pb.WatchScaleResponse(wish=known)
            while self._wait(context, lambda last: self._scale_wish != last, known):
                with self._changed:
                    servers = self._wanted_servers if self._scale_wish != known else 0
                    known = self._scale_wish
                yield pb.WatchScaleResponse(servers=servers, wish=known)
        finally:
            with self._changed:
                self._scalers -= 1

    def _wait(self, context: Any, is_due: Callable[[Any], bool], known: Any) -> bool:
        """Sleep until a message or a keep-alive is due; return False at the stream's end."""
        with self._changed:
            self._changed.wait_for(
                lambda: is_due(known) or self._closed or not context.is_active(), STREAM_SIGN_S
            )
            return not self._closed and context.is_active()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


def _cordon(planner: Planner, server_id: str) -> tuple[Member | None, str | None]:
    member = planner.pool.alive.get(server_id)
    return member, planner.cordon(server_id) if member else None
