"""For dashboard and `eaas top`: reads monitor, balancer and endpoint, with deadlines, into a snapshot."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

import grpc
import numpy as np

from eaas.cluster_snapshot.counters import Counters
from eaas.cluster_snapshot.fold import SnapshotFold
from eaas.cluster_snapshot.model import ClusterSnapshot, Decision, Load, Reading
from eaas.errors import EaasError
from eaas.net.grpc_client import channel
from eaas.net.tls import Identity
from eaas.rpc.v1 import balancer_pb2 as pb
from eaas.rpc.v1 import balancer_pb2_grpc
from eaas.types import Member, Placement, Role

__all__ = ["SnapshotReader"]

_ASK_S = 0.8
_PLAN_S = 5.0
_DECISIONS = 20
# Interval for reading the placement; also read when servers report a newer epoch.
_PLACEMENT_S = 10.0
# The bound needs a plan, which costs the balancer time. These are the interval, the interval after no result,
# and the largest share of its time.
_BOUND_S = 30.0
_NO_BOUND_S = 3.0
_BOUND_SHARE = 0.01
_VERDICTS = {
    pb.VERDICT_NOTHING: "nothing",
    pb.VERDICT_SHARES: "shares",
    pb.VERDICT_MOVES: "moves",
}


class SnapshotReader:
    """Reads monitor, balancer and endpoint with each call of `look`. For one thread at a time; close it.

    Args:
        ask_members: Takes a timeout in seconds; returns the members with their current loads. None, EaasError
            or grpc.RpcError mean that the monitor does not answer.
        ask_counters: Takes a timeout in seconds; returns the endpoint's counters, or raises EaasError or
            OSError.
        tls: Identity for the balancer; None means plain text.
    """

    def __init__(
        self,
        ask_members: Callable[[float], Sequence[Member] | None],
        ask_counters: Callable[[float], Counters],
        tls: Identity | None = None,
    ) -> None:
        self._ask_members = ask_members
        self._ask_counters = ask_counters
        self._tls = tls
        self._fold = SnapshotFold()
        # The three sources are read in parallel, so that a source that hangs costs only its own timeout.
        self._pool = ThreadPoolExecutor(3, thread_name_prefix="snapshot")
        self._connection: tuple[str, Any, Any] | None = None
        self._balancer_at = ""
        self._epoch = 0
        self._applied = 0
        self._placed_at = self._bound_at = -math.inf
        self._bound_pause_s, self._bound_rest_s = _BOUND_S, 0.0
        self._planned_of = -1

    @property
    def snapshot(self) -> ClusterSnapshot:
        """The snapshot of the last `look`; reads nothing."""
        return self._fold.snapshot

    def look(self) -> ClusterSnapshot:
        """Read monitor, balancer and endpoint once into a new snapshot; blocks about 1 s, 5 s with a plan."""
        asked = [self._pool.submit(ask) for ask in (self._members, self._endpoint, self._balancer)]
        parts: dict[str, Any] = {}
        for future in asked:
            parts |= future.result()
        members = parts.get("members")
        if members is not None:
            self._find_balancer(members)
        return self._fold.take(Reading(time.monotonic(), **parts))

    def close(self) -> None:
        """Close the connection to the balancer and the threads that read."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._disconnect()

    # -- run in parallel -------------------------------------------------------------------------------

    def _members(self) -> dict[str, Any]:
        try:
            members = self._ask_members(_ASK_S)
        except (EaasError, grpc.RpcError) as error:
            return {"monitor": _why(error)}
        if members is None:
            return {"monitor": "no answer in time"}
        return {"members": tuple(members)}

    def _endpoint(self) -> dict[str, Any]:
        try:
            return {"counters": self._ask_counters(_ASK_S)}
        except (EaasError, OSError) as error:
            return {"endpoint": _why(error)}

    def _balancer(self) -> dict[str, Any]:
        address = self._balancer_at
        if not address:
            # The balancer's address is available from the second reading on.
            why = "the cluster has none" if self._fold.snapshot.members else ""
            return {"balancer": why}
        stub = self._stub(address)
        found: dict[str, Any] = {}
        try:
            hotness = stub.GetHotness(pb.GetHotnessRequest(), timeout=_ASK_S)
            found["load"] = _load_of(hotness)
            history = stub.History(pb.HistoryRequest(limit=_DECISIONS), timeout=_ASK_S)
            found["decisions"] = tuple(_decision_of(entry) for entry in history.entries)
            now = time.monotonic()
            if self._applied > self._epoch or now - self._placed_at >= _PLACEMENT_S:
                found |= self._placement(stub)
                self._placed_at = now
            # A decision may have changed the number of slots.
            newest = max((d.number for d in found["decisions"]), default=0)
            pause_s = self._bound_pause_s if newest == self._planned_of else self._bound_rest_s
            if now - self._bound_at >= pause_s:
                self._planned_of = newest
                found["bound"] = self._bound(stub)
        except grpc.RpcError as error:
            return {"balancer": _why(error), **found}
        except ValueError as error:
            return {"balancer": f"invalid answer: {error}", **found}
        return found

    def _placement(self, stub: Any) -> dict[str, Any]:
        answer = stub.GetPlacement(pb.GetPlacementRequest(), timeout=_ASK_S)
        # Unset by a balancer of the previous version.
        found: dict[str, Any] = {"dead_grace_s": answer.dead_grace_s or None}
        if answer.placement.epoch not in (0, self._epoch):
            found["placement"] = Placement.from_proto(answer.placement)
            self._epoch = found["placement"].epoch
        return found

    def _bound(self, stub: Any) -> float | None:
        begun, pause_s = time.monotonic(), _NO_BOUND_S
        try:
            bound = float(stub.Plan(pb.PlanRequest(), timeout=_PLAN_S).bound)
            pause_s = _BOUND_S
            return bound
        except grpc.RpcError as error:
            # There is no load yet, a roll-out is in progress, or the plan takes too long.
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise
            return None
        finally:
            self._bound_at = time.monotonic()
            self._bound_rest_s = (self._bound_at - begun) / _BOUND_SHARE
            self._bound_pause_s = max(pause_s, self._bound_rest_s)

    # -- connection to the balancer --------------------------------------------------------------------

    def _find_balancer(self, members: Sequence[Member]) -> None:
        alive = [m for m in members if not m.state.is_gone]
        self._applied = max((m.epoch for m in alive if m.role is Role.EXPERT_SERVER), default=0)
        addresses = [m.address for m in members if m.role is Role.BALANCER]
        living = [m.address for m in alive if m.role is Role.BALANCER]
        # A dead balancer is still read, so that its error shows.
        self._balancer_at = next(iter((*living, *addresses)), self._balancer_at)

    def _stub(self, address: str) -> Any:
        if self._connection is None or self._connection[0] != address:
            self._disconnect()
            opened = channel(address, Role.BALANCER.value, self._tls)
            self._connection = address, opened, balancer_pb2_grpc.BalancerServiceStub(opened)
            # Another balancer may count epochs from 1 again.
            self._epoch, self._placed_at = 0, -math.inf
        return self._connection[2]

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection[1].close()
            self._connection = None


def _load_of(hotness: pb.GetHotnessResponse) -> Load:
    servers = sorted(hotness.servers, key=lambda server: server.server_id)
    layers = len(hotness.par)
    tokens_LS = np.zeros((layers, len(servers)))
    for s, server in enumerate(servers):
        tokens_LS[: len(server.tokens), s] = server.tokens[:layers]
    return Load(
        tuple(server.server_id for server in servers),
        tokens_LS,
        np.array([server.speed for server in servers]),
        np.array(hotness.par),
        hotness.steps * hotness.step_s,
    )


def _decision_of(entry: pb.HistoryEntry) -> Decision:
    as_sent = {f.name: getattr(entry, f.name) for f in fields(Decision) if f.name != "verdict"}
    return Decision(**as_sent, verdict=_VERDICTS.get(entry.verdict, "nothing"))


def _why(error: Exception) -> str:
    if isinstance(error, grpc.Call):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
