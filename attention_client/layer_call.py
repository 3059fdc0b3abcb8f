"""One MoE layer's experts, computed elsewhere: dispatch, wait, fail over, combine.

A call ends before its deadline with the right tensor or with one typed error. A pair that got no answer is
sent to another replica, and only that pair; answers that come too late are dropped by their slot's request
id. Parts are summed in fp32 in a fixed order (server, first token), whatever order they came in.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from attention_client.connection import Connection, Ticket
from attention_client.dispatch import NOWHERE, Part, assign, cumulative_shares, split
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

# Servers free slots within microseconds; a membership change takes longer, but is rare.
_RETRY_S = 0.005


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
    # Connections that did not answer this call; asked again only when nobody else is left.
    _avoided: dict[int, str] = field(default_factory=dict, init=False)

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
            while True:
                if missing_TK.any():
                    self._dispatch(missing_TK, deadline)
                if not self._attempts:
                    if not missing_TK.any():
                        return self._combine()
                    continue
                for part in self._collect(deadline):
                    missing_TK[part.rows_R] |= part.pairs_RK
        finally:
            for attempt in self._attempts:
                attempt.connection.abandon(attempt.ticket)

    # -- dispatch -------------------------------------------------------------------------------------

    def _dispatch(self, missing_TK: npt.NDArray[np.bool_], deadline: float) -> None:
        """Send every missing pair that has a usable replica; clear what was sent from `missing_TK`."""
        view = self.replicas.view()
        shares_SE = view.placement.shares_LSE[self.layer]
        usable_S = view.usable_S()
        fresh_S = usable_S & np.array([self._is_fresh(c) for c in view.connections])
        server_TK = assign(
            self.ids_TK, missing_TK, cumulative_shares(shares_SE, fresh_S), self.phase
        )
        orphans_TK = missing_TK & (server_TK == NOWHERE)
        if orphans_TK.any() and (usable_S & ~fresh_S).any() and not self._attempts:
            # Nobody else is left: those that were slow once are better than nothing.
            second_TK = assign(
                self.ids_TK, orphans_TK, cumulative_shares(shares_SE, usable_S), self.phase
            )
            server_TK = np.where(orphans_TK, second_TK, server_TK)
        sent = False
        if (server_TK != NOWHERE).any():
            top_k = self.ids_TK.shape[1]
            room = {
                s: c.max_tokens(top_k, self.x_TH.dtype)
                for s, c in enumerate(view.connections)
                if c is not None
            }
            for part in split(server_TK, room):
                if self._send(view, part, deadline):
                    missing_TK[part.rows_R] &= ~part.pairs_RK
                    sent = True
        if not sent and missing_TK.any() and not self._attempts:
            self._wait_for_help(view, missing_TK, deadline)

    def _is_fresh(self, connection: Connection | None) -> bool:
        """Neither failed in this call, nor owing an answer to an earlier one."""
        return (
            connection is not None
            and id(connection) not in self._avoided
            and not connection.owes_answer()
        )

    def _send(self, view: ClusterView, part: Part, deadline: float) -> bool:
        connection = view.connections[part.server]
        assert connection is not None
        now = self.clock()
        budget_s = connection.service.budget(
            part.rows_R.size, self.attempt_timeout_s, max(deadline - now, 0.001)
        )
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
        except ConnectionLostError:
            return False
        except SlotsBusyError:
            return False
        self._attempts.append(_Attempt(part, connection, ticket, now, now + budget_s))
        return True

    def _wait_for_help(
        self, view: ClusterView, missing_TK: npt.NDArray[np.bool_], deadline: float
    ) -> None:
        now = self.clock()
        if now >= deadline:
            experts = np.unique(self.ids_TK[missing_TK]).tolist()
            reasons = sorted(set(self._avoided.values())) or ["no server that holds it is connected"]
            raise ExpertsUnavailableError(self.layer, experts, "; ".join(reasons))
        if view.usable_S().any():
            time.sleep(_RETRY_S)
        else:
            self.replicas.wait_for_change(view, deadline - now)

    # -- collect --------------------------------------------------------------------------------------

    def _collect(self, deadline: float) -> list[Part]:
        """Wait until something happens to one attempt or more; return the parts to be sent again."""
        while True:
            watched = self._attempts[0]
            seen = watched.connection.seq()
            again: list[Part] = []
            before = len(self._attempts)
            for attempt in tuple(self._attempts):
                verdict = self._look(attempt)
                if verdict is None:
                    continue
                self._attempts.remove(attempt)
                if verdict:
                    again.append(attempt.part)
            if again or not self._attempts:
                return again
            if len(self._attempts) == before:
                until = min(deadline, *(a.expires_at for a in self._attempts))
                watched.connection.wait(watched.ticket, seen, until - self.clock())

    def _look(self, attempt: _Attempt) -> bool | None:
        """None: no answer yet. False: settled. True: to be sent again."""
        connection = attempt.connection
        try:
            result = connection.poll(attempt.ticket)
        except ConnectionLostError as error:
            return self._give_up(connection, str(error), "lost")
        except SlotCorruptError as error:
            return self._give_up(connection, f"{connection.server_id}: {error}", "corrupt")
        now = self.clock()
        if result is None:
            if now < attempt.expires_at:
                return None
            connection.abandon(attempt.ticket)
            waited_ms = (now - attempt.sent_at) * 1e3
            return self._give_up(
                connection, f"{connection.server_id}: no answer in {waited_ms:.0f} ms", "timeout"
            )
        status = result.header.status
        if status == Status.OK:
            assert result.part_RH is not None
            connection.service.observe(attempt.part.rows_R.size, now - attempt.sent_at)
            self._done.append((attempt.part, result.part_RH))
            return False
        if status == Status.INVALID_ARGUMENT:
            self._attempts.remove(attempt)
            raise WrongRequestError(f"{connection.server_id} refused a request of layer {self.layer}")
        return self._give_up(
            connection, f"{connection.server_id}: answered {Status(status).name}", "refused"
        )

    def _give_up(self, connection: Connection, reason: str, kind: str) -> bool:
        self._avoided[id(connection)] = reason
        self.metrics.failovers.labels(kind).inc()
        return True

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
