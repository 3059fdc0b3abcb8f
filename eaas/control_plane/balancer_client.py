"""Python client of the balancer, with all operator calls of `balancer.proto`; used by `eaas` commands."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import grpc

from eaas.errors import ClusterError
from eaas.net.grpc_client import Backoff, channel
from eaas.net.tls import Identity
from eaas.rpc.v1 import balancer_pb2 as pb
from eaas.rpc.v1 import balancer_pb2_grpc, common_pb2
from eaas.types import Placement, Role

__all__ = ["MOST_NUMBER", "BalancerClient"]

MOST_NUMBER = 2**31 - 1
"""Largest number of servers, layers or experts in a call to the balancer, which has lower limits."""

_CALL_S = 10.0
# Planning at full size takes seconds.
_PLAN_S = 60.0
# A refusal only informs the operator, who also sees the launcher's log.
_REFUSAL_S = 2.0
_LONGEST_REASON = 4096
_ATTEMPTS = 3
# A retry is safe, because it has the request id of the first attempt.
_AGAIN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class BalancerClient:
    """Client of one balancer, for operators and launchers. Thread-safe; close it or use `with`.

    Failed calls are retried with the same request id, so that nothing happens twice. `drain`, `scale` and
    `refuse_scale` are not retried, because launchers call them and have other work to do. Every method raises
    ClusterError if the balancer refuses (with its message) or cannot be reached.

    Args:
        address: host:port of the balancer.
        tls: Identity of the caller; None means plain text.
    """

    def __init__(self, address: str, tls: Identity | None = None) -> None:
        self.address = address
        self._channel = channel(address, Role.BALANCER.value, tls)
        self._stub: Any = balancer_pb2_grpc.BalancerServiceStub(self._channel)

    def __enter__(self) -> BalancerClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the gRPC connection to the balancer."""
        self._channel.close()

    def placement(self) -> Placement | None:
        """Get the placement in use, with all replicas and shares; None before the balancer's first one."""
        answer = self._call("GetPlacement", pb.GetPlacementRequest())
        return Placement.from_proto(answer.placement) if answer.placement.epoch else None

    def plan(
        self,
        policy: str = "",
        *,
        knobs: Mapping[str, float] | None = None,
        more_servers: int = 0,
        without_servers: Sequence[str] = (),
        loads_LE: Sequence[Sequence[int]] = (),
        speeds: Mapping[str, float] | None = None,
        redundancy: int | None = None,
        num_redundant_experts: int | None = None,
    ) -> pb.PlanResponse:
        """Make the balancer plan a placement without applying it (see `balancer.proto`, PlanRequest)."""
        request = pb.PlanRequest(
            policy=policy,
            knobs=dict(knobs or {}),
            more_servers=more_servers,
            without_servers=without_servers,
            loads=[common_pb2.LayerTokens(tokens=row) for row in loads_LE],
            speeds=dict(speeds or {}),
            redundancy=redundancy,
            num_redundant_experts=num_redundant_experts,
        )
        answer: pb.PlanResponse = self._call("Plan", request, _PLAN_S)
        return answer

    def apply(self, plan_id: str) -> pb.ApplyResponse:
        """Make the balancer roll out a plan (`plan`): experts move between servers, then clients switch."""
        answer: pb.ApplyResponse = self._change("Apply", plan_id=plan_id)
        return answer

    def apply_placement(self, placement: Placement) -> pb.ApplyResponse:
        """Make the balancer roll out a given placement; the epoch in it is ignored."""
        answer: pb.ApplyResponse = self._change("Apply", placement=placement.to_proto())
        return answer

    def rebalance(self, policy: str = "", *, force: bool = False) -> pb.RebalanceResponse:
        """Make the balancer plan now and roll out the plan if it is worth its cost, or with `force`."""
        answer: pb.RebalanceResponse = self._change(
            "Rebalance", _PLAN_S, policy=policy, force=force
        )
        return answer

    def set_policy(self, policy: str, knobs: Mapping[str, float] | None = None) -> str:
        """Change the balancer's placement policy. Returns the previous one."""
        return str(self._change("SetPolicy", policy=policy, knobs=dict(knobs or {})).policy)

    def pin(self, layer: int, expert: int, server_id: str) -> None:
        """Pin an expert of a layer to a server, which then holds a replica under every policy."""
        self._change("PinExpert", layer=layer, expert=expert, server_id=server_id)

    def unpin(self, layer: int, expert: int, server_id: str) -> None:
        """Remove the pin of an expert; its replica stays until the policy decides otherwise."""
        self._change("UnpinExpert", layer=layer, expert=expert, server_id=server_id)

    def add_replica(self, layer: int, expert: int, server_id: str = "") -> str:
        """Add a pinned replica of an expert, by default on the least loaded server. Returns the server."""
        answer = self._change("AddReplica", layer=layer, expert=expert, server_id=server_id)
        return str(answer.server_id)

    def remove_replica(self, layer: int, expert: int, server_id: str) -> None:
        """Remove a replica of an expert from a server, and its pin. Refused below the redundancy."""
        self._change("RemoveReplica", layer=layer, expert=expert, server_id=server_id)

    def drain(self, server_id: str) -> None:
        """Tell an expert server to leave: its experts move, then it ends. Returns at once."""
        self._call("DrainServer", pb.DrainServerRequest(server_id=server_id), attempts=1)

    def scale(self, servers: int) -> int:
        """Set the desired number of expert servers; launchers start or stop them. Returns the request id."""
        request = pb.ScaleRequest(servers=min(max(0, servers), MOST_NUMBER))
        return int(self._call("Scale", request, attempts=1).wish)

    def refuse_scale(self, wish: int, reason: str) -> None:
        """Tell the balancer that a launcher cannot provide the servers, which ends the waiting `eaas scale`.

        Args:
            wish: Id of the request, from `WatchScale`.
            reason: Message for the callers of `Scale`.
        """
        request = pb.RefuseScaleRequest(wish=wish, reason=reason[:_LONGEST_REASON])
        self._call("RefuseScale", request, _REFUSAL_S, attempts=1)

    def scale_state(self) -> pb.GetScaleResponse:
        """Get the limits of the number of expert servers, and the result of the last `scale`."""
        answer: pb.GetScaleResponse = self._call("GetScale", pb.GetScaleRequest())
        return answer

    def hotness(self) -> pb.GetHotnessResponse:
        """Get the experts' token counts in the balancer's load window."""
        answer: pb.GetHotnessResponse = self._call("GetHotness", pb.GetHotnessRequest())
        return answer

    def history(self, limit: int = 0) -> list[pb.HistoryEntry]:
        """Get the balancer's last decisions, with reasons and results, newest first."""
        return list(self._call("History", pb.HistoryRequest(limit=limit)).entries)

    def _change(self, name: str, timeout_s: float = _CALL_S, **fields: Any) -> Any:
        """Make a call that changes the cluster, with a new request id: retries then change it only once."""
        request = getattr(pb, f"{name}Request")(request_id=secrets.token_hex(16), **fields)
        return self._call(name, request, timeout_s)

    def _call(
        self, name: str, request: Any, timeout_s: float = _CALL_S, attempts: int = _ATTEMPTS
    ) -> Any:
        backoff = Backoff()
        for left in range(attempts - 1, -1, -1):
            try:
                return getattr(self._stub, name)(request, timeout=timeout_s)
            except grpc.RpcError as error:
                if error.code() not in _AGAIN or not left:
                    raise ClusterError(
                        f"the balancer at {self.address}: {error.details()}"
                    ) from error
            # A restarting balancer needs a moment before it answers.
            time.sleep(backoff.next_s())
        raise AssertionError("unreachable")
