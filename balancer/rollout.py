"""Carries the planner's actions out.

One thread owns the planner; calls to servers report back to it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from balancer.planner import Action, Apply, Planner, Publish, Refuse
from eaas.grpc_client import channel
from eaas.log import get_logger
from eaas.membership import MembershipView
from eaas.rpc.v1 import common_pb2, expert_pb2, expert_pb2_grpc
from eaas.types import Placement

__all__ = ["Rollout"]

_log = get_logger(__name__)

_RETRY_S = 0.5
_JOIN_S = 3.0


@dataclass(frozen=True)
class _Outcome:
    apply: Apply
    call: Any
    line: grpc.Channel


class Rollout:
    """Brings servers in line with the planner's placement, and publishes it once they are.

    Args:
        planner: Decides; used by this object's thread alone.
        publish: Called with each placement that the clients are to use.
        apply_timeout_s: Deadline of one ApplyPlacement.
    """

    def __init__(
        self, planner: Planner, publish: Callable[[Placement], None], apply_timeout_s: float
    ) -> None:
        self._planner = planner
        self._publish = publish
        self._apply_timeout_s = apply_timeout_s
        self._inbox: queue.SimpleQueue[MembershipView | _Outcome | None] = queue.SimpleQueue()
        self._running: dict[Any, grpc.Channel] = {}
        self._retries: list[tuple[float, Apply]] = []
        self._thread = threading.Thread(target=self._run, name="rollout", daemon=True)
        self._thread.start()

    def observe(self, view: MembershipView) -> None:
        """The membership changed. Does not block."""
        self._inbox.put(view)

    def close(self) -> None:
        """Cancels what runs and ends the thread. Idempotent."""
        self._inbox.put(None)
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while True:
            try:
                item = self._inbox.get(timeout=self._until_retry_s())
            except queue.Empty:
                self._retry_due()
                continue
            if item is None:
                break
            if isinstance(item, MembershipView):
                self._act(self._planner.observe(item.members))
            else:
                self._take(item)
        for call, line in self._running.items():
            call.cancel()
            line.close()

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Apply():
                    self._start(action)
                case Publish(placement):
                    _log.info("placement %d: published", placement.epoch)
                    self._publish(placement)
                case Refuse(server_id, reason):
                    _log.error("%s gets no experts: %s", server_id, reason)

    def _start(self, apply: Apply) -> None:
        epoch = apply.placement.epoch
        layers = _share(apply)
        replicas = sum(len(layer.experts) for layer in layers)
        _log.info("placement %d: %s is to hold %d replicas", epoch, apply.server_id, replicas)
        line = channel(apply.address)
        call = expert_pb2_grpc.ExpertServiceStub(line).ApplyPlacement.future(
            expert_pb2.ApplyPlacementRequest(epoch=epoch, layers=layers),
            timeout=self._apply_timeout_s,
        )
        self._running[call] = line
        call.add_done_callback(lambda done: self._inbox.put(_Outcome(apply, call, line)))

    def _take(self, outcome: _Outcome) -> None:
        apply = outcome.apply
        del self._running[outcome.call]
        outcome.line.close()
        code = outcome.call.code()
        if code is grpc.StatusCode.OK:
            self._act(self._planner.applied(apply))
            return
        _log.warning(
            "placement %d: %s did not apply it: %s: %s",
            apply.placement.epoch,
            apply.server_id,
            code.name,
            outcome.call.details(),
        )
        self._retries.append((time.monotonic() + _RETRY_S, apply))

    def _until_retry_s(self) -> float | None:
        if not self._retries:
            return None
        return max(0.0, self._retries[0][0] - time.monotonic())

    def _retry_due(self) -> None:
        # All pauses are equal, so the list is in order of time.
        while self._retries and self._retries[0][0] <= time.monotonic():
            _, apply = self._retries.pop(0)
            if self._planner.is_wanted(apply):
                self._start(apply)


def _share(apply: Apply) -> list[common_pb2.Holding]:
    placement = apply.placement
    if apply.server_id in placement.servers:
        message = placement.to_proto()
        return list(message.servers[placement.servers.index(apply.server_id)].layers)
    return [common_pb2.Holding() for _ in range(placement.holds_LSE.shape[0])]
