"""Asks monitor, balancer and endpoint, each within a deadline, and folds what they say into facts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np

from eaas.errors import EaasError
from eaas.facts.counters import Counters
from eaas.facts.fold import FactsFold
from eaas.facts.model import Answer, Decision, Facts, Load, Reading
from eaas.grpc_client import channel
from eaas.rpc.v1 import balancer_pb2 as pb
from eaas.rpc.v1 import balancer_pb2_grpc
from eaas.tls import Identity
from eaas.types import Member, Placement, Role

__all__ = ["FactsReader"]

_ASK_S = 0.8
_PLAN_S = 5.0
_DECISIONS = 20
# The placement is asked for where somebody applied another one, and so often besides.
_PLACEMENT_S = 10.0
# A plan costs the balancer time: it is made so rarely, and never for more than this share of it. Where
# there can be none yet, it is soon asked for again.
_BOUND_S = 30.0
_NO_BOUND_S = 3.0
_BOUND_SHARE = 0.01
_VERDICTS = {
    pb.VERDICT_NOTHING: "nothing",
    pb.VERDICT_SHARES: "shares",
    pb.VERDICT_MOVES: "moves",
}


class FactsReader:
    """Looks at a cluster whenever `look` is called. For one thread at a time; close it.

    Args:
        ask_members: The members with their loads of this moment; called with the seconds to wait at most.
            None, or an EaasError or grpc.RpcError: the monitor does not answer.
        ask_counters: What the endpoint has counted; called with the seconds to wait at most. Raises
            EaasError or OSError where it does not answer.
        tls: Who asks the balancer; None: plain text.
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
        self._fold = FactsFold()
        # The three are asked at the same time: one that hangs does not make a look longer than its own wait.
        self._pool = ThreadPoolExecutor(3, thread_name_prefix="facts")
        self._line: tuple[str, Any, Any] | None = None
        self._balancer_at = ""
        self._epoch = 0
        self._applied = 0
        self._placed_at = self._bound_at = -math.inf
        self._bound_pause_s, self._bound_rest_s = _BOUND_S, 0.0
        self._planned_of = -1

    @property
    def facts(self) -> Facts:
        """Of the last look."""
        return self._fold.facts

    def look(self) -> Facts:
        """Ask everybody once. Takes as long as the slowest, a second or so at most; a plan may take 5 s."""
        asked = [self._pool.submit(ask) for ask in (self._members, self._endpoint, self._balancer)]
        parts: dict[str, Any] = {}
        for future in asked:
            parts |= future.result()
        members = parts.get("members")
        if members is not None:
            self._find_balancer(members)
        return self._fold.take(Reading(time.monotonic(), **parts))

    def close(self) -> None:
        """Ends connections and threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._disconnect()

    # -- each runs on a thread of its own --------------------------------------------------------------

    def _members(self) -> dict[str, Any]:
        try:
            members = self._ask_members(_ASK_S)
        except (EaasError, grpc.RpcError) as error:
            return {"monitor": Answer(_why(error))}
        if members is None:
            return {"monitor": Answer("no answer in time")}
        return {"members": tuple(members)}

    def _endpoint(self) -> dict[str, Any]:
        try:
            return {"counters": self._ask_counters(_ASK_S)}
        except (EaasError, OSError) as error:
            return {"endpoint": Answer(_why(error))}

    def _balancer(self) -> dict[str, Any]:
        address = self._balancer_at
        if not address:
            # Known from the second look on.
            why = "none is in the cluster" if self._fold.facts.members else ""
            return {"balancer": Answer(why)}
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
            # After a decision the slots may be others.
            newest = max((d.number for d in found["decisions"]), default=0)
            pause_s = self._bound_pause_s if newest == self._planned_of else self._bound_rest_s
            if now - self._bound_at >= pause_s:
                self._planned_of = newest
                found["bound"] = self._bound(stub)
        except grpc.RpcError as error:
            return {"balancer": Answer(_why(error)), **found}
        except ValueError as error:
            return {"balancer": Answer(f"what it says is not understood: {error}"), **found}
        return found

    def _placement(self, stub: Any) -> dict[str, Any]:
        answer = stub.GetPlacement(pb.GetPlacementRequest(), timeout=_ASK_S)
        # A balancer of the version before does not say it.
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
            # Nothing was computed yet, or a roll-out goes on; or the plan takes too long to be asked for.
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise
            return None
        finally:
            self._bound_at = time.monotonic()
            self._bound_rest_s = (self._bound_at - begun) / _BOUND_SHARE
            self._bound_pause_s = max(pause_s, self._bound_rest_s)

    # -- the balancer's line ---------------------------------------------------------------------------

    def _find_balancer(self, members: Sequence[Member]) -> None:
        alive = [m for m in members if not m.state.is_gone]
        self._applied = max((m.epoch for m in alive if m.role is Role.EXPERT_SERVER), default=0)
        addresses = [m.address for m in members if m.role is Role.BALANCER]
        living = [m.address for m in alive if m.role is Role.BALANCER]
        # One that is dead goes on to be asked: it is it that is missed.
        self._balancer_at = next(iter((*living, *addresses)), self._balancer_at)

    def _stub(self, address: str) -> Any:
        if self._line is None or self._line[0] != address:
            self._disconnect()
            line = channel(address, Role.BALANCER.value, self._tls)
            self._line = address, line, balancer_pb2_grpc.BalancerServiceStub(line)
            # A balancer that begins anew may count epochs anew.
            self._epoch, self._placed_at = 0, -math.inf
        return self._line[2]

    def _disconnect(self) -> None:
        if self._line is not None:
            self._line[1].close()
            self._line = None


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
    return Decision(
        number=entry.number,
        unix_ms=entry.unix_ms,
        trigger=entry.trigger,
        policy=entry.policy,
        verdict=_VERDICTS.get(entry.verdict, "nothing"),
        reason=entry.reason,
        par_now=entry.par_now,
        par_then=entry.par_then,
        bound=entry.bound,
        transit=entry.transit,
        epoch=entry.epoch,
        given_up=entry.given_up,
    )


def _why(error: Exception) -> str:
    if isinstance(error, grpc.Call):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
