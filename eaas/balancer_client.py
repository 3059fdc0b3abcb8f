"""The balancer's load-balance API for programs: every call of `balancer.proto` that is an operator's."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import grpc

from eaas.balancer_calls import MOST_NUMBER
from eaas.errors import ClusterError
from eaas.grpc_client import Backoff, channel
from eaas.rpc.v1 import balancer_pb2 as pb
from eaas.rpc.v1 import balancer_pb2_grpc, common_pb2
from eaas.tls import Identity
from eaas.types import Placement, Role

__all__ = ["BalancerClient"]

_T = TypeVar("_T")

_CALL_S = 10.0
# Planning at full size takes seconds.
_PLAN_S = 60.0
_ATTEMPTS = 3
# The same call again does no harm: it has the id of the first one.
_AGAIN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class BalancerClient:
    """Calls of one balancer. Any thread may use it; close it, or use it as a context.

    What fails on the way is tried again, with the same request id, so that nothing happens twice.

    Args:
        address: host:port of the balancer.
        tls: Who calls; None: plain text.

    Every method raises ClusterError with the balancer's own words where it refuses, and where it cannot be
    reached.
    """

    def __init__(self, address: str, tls: Identity | None = None) -> None:
        self.address = address
        self._channel = channel(address, Role.BALANCER.value, tls)
        self._stub: Any = balancer_pb2_grpc.BalancerServiceStub(self._channel)

    def __enter__(self) -> BalancerClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()

    def placement(self) -> Placement | None:
        """The placement now; None while there is none."""
        answer = self._call(self._stub.GetPlacement, pb.GetPlacementRequest())
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
        """A dry run: what another placement would be worth (arguments: `balancer.proto`, PlanRequest)."""
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
        answer: pb.PlanResponse = self._call(self._stub.Plan, request, _PLAN_S)
        return answer

    def apply(self, plan_id: str) -> pb.ApplyResponse:
        """Rolls a plan out."""
        return self._change(self._stub.Apply, pb.ApplyRequest, pb.ApplyResponse, plan_id=plan_id)

    def apply_placement(self, placement: Placement) -> pb.ApplyResponse:
        """Rolls a placement of one's own out; its epoch is not looked at."""
        message = placement.to_proto()
        return self._change(self._stub.Apply, pb.ApplyRequest, pb.ApplyResponse, placement=message)

    def rebalance(self, policy: str = "", *, force: bool = False) -> pb.RebalanceResponse:
        """Plans now, and rolls out what pays; with `force` whatever was planned."""
        return self._change(
            self._stub.Rebalance,
            pb.RebalanceRequest,
            pb.RebalanceResponse,
            _PLAN_S,
            policy=policy,
            force=force,
        )

    def set_policy(self, policy: str, knobs: Mapping[str, float] | None = None) -> str:
        """What decides from now on. Returns the policy before."""
        answer = self._change(
            self._stub.SetPolicy,
            pb.SetPolicyRequest,
            pb.SetPolicyResponse,
            policy=policy,
            knobs=dict(knobs or {}),
        )
        return str(answer.policy)

    def pin(self, layer: int, expert: int, server_id: str) -> None:
        """Has a server hold an expert, whatever policies say."""
        fields: dict[str, Any] = {"layer": layer, "expert": expert, "server_id": server_id}
        self._change(self._stub.PinExpert, pb.PinExpertRequest, pb.PinExpertResponse, **fields)

    def unpin(self, layer: int, expert: int, server_id: str) -> None:
        """Leaves that to the policies again."""
        fields: dict[str, Any] = {"layer": layer, "expert": expert, "server_id": server_id}
        self._change(
            self._stub.UnpinExpert, pb.UnpinExpertRequest, pb.UnpinExpertResponse, **fields
        )

    def add_replica(self, layer: int, expert: int, server_id: str = "") -> str:
        """One more, pinned; on the server with the least load where none is named. Returns the server."""
        fields: dict[str, Any] = {"layer": layer, "expert": expert, "server_id": server_id}
        answer = self._change(
            self._stub.AddReplica, pb.AddReplicaRequest, pb.AddReplicaResponse, **fields
        )
        return str(answer.server_id)

    def remove_replica(self, layer: int, expert: int, server_id: str) -> None:
        """One less."""
        fields: dict[str, Any] = {"layer": layer, "expert": expert, "server_id": server_id}
        self._change(
            self._stub.RemoveReplica, pb.RemoveReplicaRequest, pb.RemoveReplicaResponse, **fields
        )

    def drain(self, server_id: str) -> None:
        """Has a server leave, once others have its experts."""
        self._call(self._stub.DrainServer, pb.DrainServerRequest(server_id=server_id))

    def scale(self, servers: int) -> int:
        """Has a launcher start or end servers until there are so many. Returns the name of the wish."""
        request = pb.ScaleRequest(servers=min(max(0, servers), MOST_NUMBER))
        return int(self._call(self._stub.Scale, request).wish)

    def scale_state(self) -> pb.GetScaleResponse:
        """How few and how many servers there may be, and what became of the last wish."""
        answer: pb.GetScaleResponse = self._call(self._stub.GetScale, pb.GetScaleRequest())
        return answer

    def hotness(self) -> pb.GetHotnessResponse:
        """Tokens of the window."""
        answer: pb.GetHotnessResponse = self._call(self._stub.GetHotness, pb.GetHotnessRequest())
        return answer

    def history(self, limit: int = 0) -> list[pb.HistoryEntry]:
        """What was decided, the newest first."""
        return list(self._call(self._stub.History, pb.HistoryRequest(limit=limit)).entries)

    def _change(
        self,
        method: Callable[..., Any],
        request: Callable[..., Any],
        answer: Callable[[], _T],
        timeout_s: float = _CALL_S,
        **fields: Any,
    ) -> _T:
        """A call with an effect, with an id of its own. `answer` is the type of what comes back."""
        asked = request(request_id=secrets.token_hex(16), **fields)
        found: _T = self._call(method, asked, timeout_s)
        return found

    def _call(self, method: Callable[..., Any], request: Any, timeout_s: float = _CALL_S) -> Any:
        backoff = Backoff()
        for left in range(_ATTEMPTS - 1, -1, -1):
            try:
                return method(request, timeout=timeout_s)
            except grpc.RpcError as error:
                if error.code() not in _AGAIN or not left:
                    raise ClusterError(
                        f"the balancer at {self.address}: {error.details()}"
                    ) from error
            # Whoever is gone for a moment is back after that, or another one is.
            time.sleep(backoff.next_s())
        raise AssertionError("unreachable")
