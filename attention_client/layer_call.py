"""One MoE layer's experts, computed elsewhere: dispatch, wait, fail over, combine.

A call ends before its deadline with the right tensor or with one typed error. A pair that got no answer is
sent to another replica, and only that pair; answers that come too late are dropped by their slot's request
id. Parts are summed in fp32 in a fixed order (server, first token), whatever order they came in.
"""

from __future__ import annotations

import enum
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from attention_client.connection import Connection, Ticket
from attention_client.dispatch import Part, assign, cumulative_shares, split
from attention_client.metrics import ClientMetrics
from eaas.errors import (
    ConnectionLostError,
    ExpertsUnavailableError,
    SlotCorruptError,
    SlotsBusyError,
    WrongRequestError,
)
from eaas.types import Placement
from eaas.wire.slot import Status

__all__ = ["ClusterView", "LayerCall", "Replicas"]

# Before servers that were busy, or failed in this call, are asked again. Busy ones free slots within
# microseconds; a placement or a membership that changes ends the pause at once.
_RETRY_S = 0.005
_LEAST_BUDGET_S = 0.001


@dataclass(frozen=True, eq=False)
class ClusterView:
    """What a call needs to know; replaced as a whole when anything changes.

    Attributes:
        placement: Version, servers, shares.
        connections: One per server of the placement; None where there is none.
    """

    placement: Placement
    connections: tuple[Connection | None, ...]

    def usable_S(self) -> npt.NDArray[np.bool_]:
        """Servers with a live connection."""
        return np.array([c is not None and c.lost_reason is None for c in self.connections])


class Replicas(Protocol):
    """Where views come from."""

    def view(self) -> ClusterView:
        """The newest view."""

    def wait_for_change(self, seen: ClusterView, timeout_s: float) -> None:
        """Sleep until there is another view than `seen`, or the time is over."""


class _Verdict(enum.Enum):
    """What a look at an attempt found."""

    WAITING = enum.auto()
    ANSWERED = enum.auto()
    FAILED = enum.auto()


@dataclass(eq=False)
class _Attempt:
    part: Part
    connection: Connection
    ticket: Ticket
    sent_at: float
    expires_at: float


@dataclass(eq=False)
class LayerCall:
    """One call of one layer. Make it, `run` it once.

    Args:
        replicas: Source of views.
        layer: MoE layer.
        x_TH: Hidden states, contiguous, on the CPU.
        ids_TK: int64, logical experts.
        scores_TK: float32.
        wanted_TK: Pairs to compute; the others count as 0.
        timeout_s: Deadline over all attempts.
        attempt_timeout_s: Least time of one attempt.
        phase: See `dispatch.assign`.
        metrics: Counters.
        clock: Monotonic seconds.
    """

    replicas: Replicas
    layer: int
    x_TH: torch.Tensor
    ids_TK: npt.NDArray[np.int64]
    scores_TK: npt.NDArray[np.float32]
    wanted_TK: npt.NDArray[np.bool_]
    timeout_s: float
    attempt_timeout_s: float
    phase: float
    metrics: ClientMetrics
    clock: Callable[[], float] = time.monotonic
    _attempts: list[_Attempt] = field(default_factory=list, init=False)
    _done: list[tuple[Part, torch.Tensor]] = field(default_factory=list, init=False)
    # Connections that failed in this call, and why; asked again only when nobody else is left.
    _avoided: dict[Connection, str] = field(default_factory=dict, init=False)
    _timeouts: Counter[Connection] = field(default_factory=Counter, init=False)

    def run(self) -> torch.Tensor:
        """Compute the layer.

        Returns:
            float32 (T, H): the weighted sum over the wanted pairs.

        Raises:
            ExpertsUnavailableError: The deadline passed while a pair had no answer.
            WrongRequestError: A server refused the request itself.
        """
        deadline = self.clock() + self.timeout_s
        missing_TK = self.wanted_TK.copy()
        try:
            while missing_TK.any() or self._attempts:
                if missing_TK.any():
                    self._dispatch(missing_TK, deadline)
                if self._attempts:
                    for part in self._collect():
                        missing_TK[part.rows_R] |= part.pairs_RK
            return self._combine()
        finally:
            for attempt in self._attempts:
                attempt.connection.abandon(attempt.ticket)

    # -- dispatch -------------------------------------------------------------------------------------

    def _dispatch(self, missing_TK: npt.NDArray[np.bool_], deadline: float) -> None:
        """Send missing pairs to usable replicas; clear what was sent from `missing_TK`.

        Where nothing could be sent and nothing is in flight, returns after a pause.
        """
        if self.clock() >= deadline:
            raise self._unavailable(missing_TK)
        view = self.replicas.view()
        usable_S = view.usable_S()
        fresh_S = usable_S & np.array([self._is_fresh(c) for c in view.connections])
        self._send_to(view, fresh_S, missing_TK, deadline)
        if self._attempts:
            return
        # Nobody else is left: those that failed once, or are slow, are better than nothing.
        if any(c in self._avoided for c in view.connections):
            self._pause(view, deadline)
            if self.replicas.view() is not view or self.clock() >= deadline:
                return
        self._send_to(view, usable_S, missing_TK, deadline)
        if not self._attempts:
            self._pause(view, deadline)

    def _send_to(
        self,
        view: ClusterView,
        servers_S: npt.NDArray[np.bool_],
        missing_TK: npt.NDArray[np.bool_],
        deadline: float,
    ) -> None:
        shares_SE = view.placement.shares_LSE[self.layer]
        server_TK = assign(
            self.ids_TK, missing_TK, cumulative_shares(shares_SE, servers_S), self.phase
        )
        top_k = self.ids_TK.shape[1]
        room = {
            s: c.max_tokens(top_k, self.x_TH.dtype)
            for s, c in enumerate(view.connections)
            if c is not None
        }
        for part in split(server_TK, room):
            if self._send(view, part, deadline):
                missing_TK[part.rows_R] &= ~part.pairs_RK

    def _is_fresh(self, connection: Connection | None) -> bool:
        """Neither failed in this call, nor owing an answer to an earlier one."""
        return (
            connection is not None
            and connection not in self._avoided
            and not connection.owes_answer()
        )

    def _send(self, view: ClusterView, part: Part, deadline: float) -> bool:
        connection = view.connections[part.server]
        assert connection is not None
        now = self.clock()
        left_s = max(deadline - now, _LEAST_BUDGET_S)
        budget_s = connection.service.budget(part.rows_R.size, self.attempt_timeout_s, left_s)
        # Twice as long each time: the only replica may have become slower than it ever was.
        budget_s = min(budget_s * 2.0 ** self._timeouts[connection], left_s)
        ids_RK = np.where(part.pairs_RK, self.ids_TK[part.rows_R], -1).astype(np.int32)
        x_RH = self.x_TH
        if part.rows_R.size != x_RH.shape[0]:
            x_RH = x_RH.index_select(0, torch.from_numpy(part.rows_R))
        try:
            ticket = connection.submit(
                self.layer,
                view.placement.epoch,
                x_RH,
                ids_RK,
                self.scores_TK[part.rows_R],
                budget_s,
            )
        except (ConnectionLostError, SlotsBusyError):
            return False
        self._attempts.append(_Attempt(part, connection, ticket, now, now + budget_s))
        return True

    def _pause(self, view: ClusterView, deadline: float) -> None:
        left_s = deadline - self.clock()
        if view.usable_S().any():
            left_s = min(left_s, _RETRY_S)
        self.replicas.wait_for_change(view, max(left_s, 0.0))

    def _unavailable(self, missing_TK: npt.NDArray[np.bool_]) -> ExpertsUnavailableError:
        experts = np.unique(self.ids_TK[missing_TK]).tolist()
        reasons = sorted(set(self._avoided.values())) or ["no server that holds it could be asked"]
        return ExpertsUnavailableError(self.layer, experts, "; ".join(reasons))

    # -- collect --------------------------------------------------------------------------------------

    def _collect(self) -> list[Part]:
        """Wait until at least one attempt ends; return the parts to be sent again."""
        while True:
            watched = self._attempts[0]
            seen = watched.connection.seq()
            again: list[Part] = []
            answered: list[_Attempt] = []
            before = len(self._attempts)
            for attempt in tuple(self._attempts):
                verdict = self._look(attempt)
                if verdict is _Verdict.WAITING:
                    continue
                self._attempts.remove(attempt)
                if verdict is _Verdict.FAILED:
                    again.append(attempt.part)
                else:
                    answered.append(attempt)
            if len(self._attempts) < before:
                # Only one bell is waited on, so an answer may have lain there for a while: where that one
                # failed, the time says nothing about the others.
                if not again:
                    self._learn(answered)
                return again
            until = min(a.expires_at for a in self._attempts)
            watched.connection.wait(watched.ticket, seen, until - self.clock())

    def _learn(self, answered: list[_Attempt]) -> None:
        now = self.clock()
        for attempt in answered:
            attempt.connection.service.observe(attempt.part.rows_R.size, now - attempt.sent_at)

    def _look(self, attempt: _Attempt) -> _Verdict:
        """Settle an attempt that ended."""
        connection = attempt.connection
        name = connection.server_id
        try:
            result = connection.poll(attempt.ticket)
        except ConnectionLostError as error:
            return self._give_up(connection, str(error), "lost")
        except SlotCorruptError as error:
            return self._give_up(connection, f"{name}: {error}", "corrupt")
        if result is None:
            now = self.clock()
            if now < attempt.expires_at:
                return _Verdict.WAITING
            connection.abandon(attempt.ticket)
            self._timeouts[connection] += 1
            waited_ms = (now - attempt.sent_at) * 1e3
            return self._give_up(connection, f"{name}: no answer in {waited_ms:.0f} ms", "timeout")
        status = Status(result.header.status)
        if status is Status.OK:
            assert result.part_RH is not None
            self._done.append((attempt.part, result.part_RH))
            return _Verdict.ANSWERED
        if status is Status.INVALID_ARGUMENT:
            raise WrongRequestError(f"{name} refused a request of layer {self.layer}")
        return self._give_up(connection, f"{name}: answered {status.name}", "refused")

    def _give_up(self, connection: Connection, reason: str, kind: str) -> _Verdict:
        self._avoided[connection] = reason
        self.metrics.failovers.labels(kind).inc()
        return _Verdict.FAILED

    # -- combine --------------------------------------------------------------------------------------

    def _combine(self) -> torch.Tensor:
        out_TH = torch.zeros(self.x_TH.shape, dtype=torch.float32)
        for part, part_RH in sorted(self._done, key=_order):
            if part.rows_R.size == out_TH.shape[0]:
                out_TH += part_RH
            else:
                out_TH.index_add_(0, torch.from_numpy(part.rows_R), part_RH)
        return out_TH


def _order(done: tuple[Part, torch.Tensor]) -> tuple[int, int, bytes]:
    part = done[0]
    return part.server, int(part.rows_R[0]), part.pairs_RK.tobytes()
