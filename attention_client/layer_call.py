"""One MoE layer's experts, computed elsewhere: dispatch, wait, hedge, fail over, combine.

A call ends before its deadline with the right tensor or with one typed error. A pair that got no answer is
sent to another replica, and only that pair; answers that come too late are dropped by their slot's request
id. Parts are summed in fp32 in a fixed order (server, first token), whatever order they came in.
"""

from __future__ import annotations

import enum
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from attention_client.attempts import Attempt, Race, Result
from attention_client.budget import HedgeBudget
from attention_client.connection import Connection
from attention_client.dispatch import DispatchPolicy
from attention_client.dispatch.parts import NOWHERE, Part, combine, group, split
from attention_client.messages import LayerInput
from attention_client.metrics import ClientMetrics
from attention_client.outcomes import Outcome, failure
from attention_client.speeds import Ejections, Speeds
from eaas.errors import (
    ConnectionLostError,
    ExpertsUnavailableError,
    SlotCorruptError,
    SlotsBusyError,
    WrongRequestError,
)
from eaas.types import Placement
from eaas.wire.slot import Status

__all__ = ["ClusterView", "Dispatcher", "LayerCall", "Replicas"]

# Before servers that were busy, or failed in this call, are asked again. Busy ones free slots within
# microseconds; a placement or a membership that changes ends the pause at once.
_RETRY_S = 0.005
_LEAST_BUDGET_S = 0.001
# How often all sides of a race are looked at.
_RACE_LOOK_S = 0.0005
# A hedge earlier than this would be against the scheduler's noise, not against a slow server.
_LEAST_HEDGE_S = 0.002


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


@dataclass(frozen=True, eq=False)
class Dispatcher:
    """What the calls of one client share; may be used by several threads.

    Attributes:
        replicas: Source of views.
        policy: Chooses among replicas.
        timeout_s: Deadline of a call over all attempts.
        attempt_timeout_s: Least time of one attempt.
        hedges: Budget of hedges.
        speeds: Of the servers.
        ejections: Of the servers.
        metrics: Counters.
        clock: Monotonic seconds.
    """

    replicas: Replicas
    policy: DispatchPolicy
    timeout_s: float
    attempt_timeout_s: float
    hedges: HedgeBudget
    metrics: ClientMetrics
    speeds: Speeds = field(default_factory=Speeds)
    ejections: Ejections = field(default_factory=Ejections)
    clock: Callable[[], float] = time.monotonic


class _Look(enum.Enum):
    """What a look at an attempt found, if not a result."""

    WAITING = enum.auto()
    FAILED = enum.auto()


class LayerCall:
    """One call of one layer. Make it, `run` it once.

    Args:
        dispatcher: Shared by all calls.
        inputs: Layer, hidden states, scores.
        ids_TK: int64, logical experts.
        wanted_TK: Pairs to compute; the others count as 0.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        inputs: LayerInput,
        ids_TK: npt.NDArray[np.int64],
        wanted_TK: npt.NDArray[np.bool_],
    ) -> None:
        self._shared = dispatcher
        self._inputs = inputs
        # The compiled loops take them as they lie in memory.
        self._ids_TK = np.ascontiguousarray(ids_TK)
        self._wanted_TK = np.ascontiguousarray(wanted_TK)
        self._attempts: list[Attempt] = []
        self._results: list[Result] = []
        # Connections that failed in this call, and why; asked again only when nobody else is left.
        self._avoided: dict[Connection, str] = {}
        self._timeouts: Counter[Connection] = Counter()
        # Servers that have been blamed for something in this call.
        self._blamed: set[Connection] = set()
        self._waited_on: Attempt | None = None
        self._deadline = math.inf

    def run(self) -> torch.Tensor:
        """Compute the layer.

        Returns:
            float32 (T, H): the weighted sum over the wanted pairs.

        Raises:
            ExpertsUnavailableError: The deadline passed while a pair had no answer.
            WrongRequestError: A server refused the request itself.
        """
        self._deadline = self._shared.clock() + self._shared.timeout_s
        try:
            while True:
                self._gather()
                out_TH = combine(
                    self._inputs.x_TH.shape, [(r.part, r.part_RH) for r in self._results]
                )
                # Every slot is to be released, whatever the others say.
                if all([result.release() for result in self._results]):
                    return out_TH
                # A slot was given to another client while it was read. Rare enough to begin anew.
                self._results.clear()
        finally:
            won = [r for a in self._attempts if a.race is not None for r in a.race.answered]
            self._call_off(self._attempts, self._results + won)

    def _gather(self) -> None:
        """Dispatch and wait until there is a result for every wanted pair."""
        missing_TK = self._wanted_TK.copy()
        while missing_TK.any() or self._attempts:
            if missing_TK.any():
                self._bank(missing_TK)
                self._dispatch(missing_TK)
            if self._attempts:
                for part in self._collect():
                    missing_TK[part.rows_R] |= part.pairs_RK

    def _bank(self, missing_TK: npt.NDArray[np.bool_]) -> None:
        """Free the slots of results: what is missing needs slots, too."""
        for result in tuple(self._results):
            if not result.bank():
                self._results.remove(result)
                missing_TK[result.part.rows_R] |= result.part.pairs_RK

    # -- dispatch -------------------------------------------------------------------------------------

    def _dispatch(self, missing_TK: npt.NDArray[np.bool_]) -> None:
        """Send missing pairs to usable replicas; clear what was sent from `missing_TK`.

        Where nothing could be sent and nothing is in flight, returns after a pause.
        """
        now = self._shared.clock()
        if now >= self._deadline:
            raise self._unavailable(missing_TK)
        view = self._shared.replicas.view()
        usable_S = view.usable_S()
        sound_S = usable_S & self._sound_S(view)
        kept_S = self._kept_S(view, now)
        self._send_to(view, sound_S & kept_S, missing_TK)
        if missing_TK.any() and not kept_S.all():
            # Where only an ejected server is left, it is better than one that failed just now.
            self._send_to(view, sound_S, missing_TK)
        if self._attempts:
            return
        # Nobody else is left: those that failed once, or are slow, are better than nothing.
        if any(c in self._avoided for c in view.connections):
            self._pause(view)
            if self._shared.replicas.view() is not view or self._shared.clock() >= self._deadline:
                return
        self._send_to(view, usable_S, missing_TK)
        if not self._attempts:
            self._pause(view)

    def _sound_S(self, view: ClusterView) -> npt.NDArray[np.bool_]:
        """Servers that did not fail in this call and owe no answer to an earlier one."""
        return np.array(
            [
                c is not None and c not in self._avoided and not c.owes_answer()
                for c in view.connections
            ]
        )

    def _kept_S(self, view: ClusterView, now: float) -> npt.NDArray[np.bool_]:
        """Servers that are not ejected."""
        ejections = self._shared.ejections
        return np.array([not ejections.out(server, now) for server in view.placement.servers])

    def _send_to(
        self,
        view: ClusterView,
        servers_S: npt.NDArray[np.bool_],
        missing_TK: npt.NDArray[np.bool_],
    ) -> None:
        server_C, parts = self._plan(view, servers_S, missing_TK)
        sent = [part for part in parts if self._send(view, part) is not None]
        for _ in sent:
            self._shared.hedges.earn()
        if len(sent) == len(parts) and not (server_C == NOWHERE).any():
            missing_TK[...] = False
            return
        for part in sent:
            missing_TK[part.rows_R] &= ~part.pairs_RK

    def _plan(
        self,
        view: ClusterView,
        servers_S: npt.NDArray[np.bool_],
        wanted_TK: npt.NDArray[np.bool_],
    ) -> tuple[npt.NDArray[np.int64], list[Part]]:
        """Choose a server for each chunk of pairs, and make parts of them."""
        connections, inputs = view.connections, self._inputs
        shares_SE = view.placement.shares_LSE[inputs.layer]
        if not servers_S.all():
            shares_SE = shares_SE * servers_S[:, None]
        chunks = group(self._ids_TK, wanted_TK, shares_SE.shape[1])
        load = self._shared.speeds.load(
            view.placement.servers,
            [c.work_in_flight if c is not None else 0.0 for c in connections],
            self._shared.clock(),
        )
        server_C = self._shared.policy.choose(chunks, shares_SE, load)
        top_k = self._ids_TK.shape[1]
        room = [c.max_tokens(top_k, inputs.dtype) if c is not None else 1 for c in connections]
        return server_C, split(self._ids_TK, chunks, server_C, room)

    def _send(self, view: ClusterView, part: Part) -> Attempt | None:
        """Ask a server for a part; None where it cannot be asked now."""
        connection = view.connections[part.server]
        assert connection is not None
        shared = self._shared
        now = shared.clock()
        left_s = max(self._deadline - now, _LEAST_BUDGET_S)
        rows = part.rows_R.size
        budget_s = connection.service.budget(rows, shared.attempt_timeout_s, left_s)
        # Twice as long each time: the only replica may have become slower than it ever was.
        budget_s = min(budget_s * 2.0 ** self._timeouts[connection], left_s)
        try:
            ticket = connection.submit(self._inputs, view.placement.epoch, part, budget_s)
        except (ConnectionLostError, SlotsBusyError):
            return None
        tail_s = connection.service.tail_s(rows)
        hedge_at = math.inf if tail_s is None else now + max(tail_s, _LEAST_HEDGE_S)
        attempt = Attempt(part, connection, ticket, now, hedge_at, now + budget_s)
        self._attempts.append(attempt)
        return attempt

    def _pause(self, view: ClusterView) -> None:
        left_s = self._deadline - self._shared.clock()
        if view.usable_S().any():
            left_s = min(left_s, _RETRY_S)
        self._shared.replicas.wait_for_change(view, max(left_s, 0.0))

    def _unavailable(self, missing_TK: npt.NDArray[np.bool_]) -> ExpertsUnavailableError:
        experts = np.unique(self._ids_TK[missing_TK]).tolist()
        reasons = sorted(set(self._avoided.values())) or ["no server that holds it could be asked"]
        return ExpertsUnavailableError(self._inputs.layer, experts, "; ".join(reasons))

    # -- collect --------------------------------------------------------------------------------------

    def _collect(self) -> list[Part]:
        """Wait until at least one attempt ends; return the parts to be sent again."""
        while True:
            watched = self._attempts[0]
            seen = watched.connection.seq()
            ended = False
            again: list[Part] = []
            answered: list[Attempt] = []
            for attempt in tuple(self._attempts):
                if attempt not in self._attempts:
                    continue  # The end of another one was its end, too.
                found = self._look(attempt)
                if found is _Look.WAITING:
                    continue
                ended = True
                self._attempts.remove(attempt)
                if isinstance(found, Result):
                    answered.append(attempt)
                    self._settle_answered(attempt, found)
                else:
                    again += self._settle_failed(attempt)
            if ended:
                # Where another one failed, the time says nothing about these.
                if not again:
                    self._learn(answered)
                return again
            now = self._shared.clock()
            for attempt in tuple(self._attempts):
                if attempt.hedge_at <= now:
                    self._hedge(attempt)
            until = min(min(a.expires_at, a.hedge_at) for a in self._attempts)
            if any(attempt.race for attempt in self._attempts):
                # Whoever is first ends the race, and only one of them can be watched.
                until = min(until, now + _RACE_LOOK_S)
            self._waited_on = watched
            watched.connection.wait(watched.ticket, seen, until - now)

    def _learn(self, answered: list[Attempt]) -> None:
        shared = self._shared
        now = shared.clock()
        servers = shared.replicas.view().placement.servers
        ejections, speeds = shared.ejections, shared.speeds
        for attempt in answered:
            connection, rows, took_s = (
                attempt.connection,
                attempt.part.rows_R.size,
                now - attempt.sent_at,
            )
            if self._waited_on in (None, attempt):
                connection.service.observe(rows, took_s)
            else:
                # It may have been there while another one was waited on.
                connection.service.observe_bound(rows, took_s)
            name = connection.server_id
            slow = speeds.is_outlier(name, servers, ejections.SLOW_FACTOR, ejections.SLOW_ANSWERS)
            if slow and ejections.slow(name, servers, now):
                # When it is asked again, it is to be judged by what it does then.
                speeds.forget(name)
                shared.metrics.ejections.labels("slow").inc()

    def _look(self, attempt: Attempt) -> Result | _Look:
        """Poll an attempt."""
        connection, shared = attempt.connection, self._shared
        name = connection.server_id
        try:
            answer = connection.poll(attempt.ticket)
        except ConnectionLostError as error:
            # Whoever is gone gets no requests anyway, and its next life is another one.
            return self._give_up(connection, str(error), "lost", blame=False)
        except SlotCorruptError as error:
            return self._give_up(connection, f"{name}: {error}", "corrupt")
        now = shared.clock()
        if answer is None:
            if now < attempt.expires_at:
                return _Look.WAITING
            connection.abandon(attempt.ticket, overdue=True)
            self._timeouts[connection] += 1
            waited_ms = (now - attempt.sent_at) * 1e3
            return self._give_up(connection, f"{name}: no answer in {waited_ms:.0f} ms", "timeout")
        if answer.part_RH is not None:
            shared.ejections.answered(name)
            shared.metrics.outcomes.count(connection, Outcome.ANSWERED)
            if answer.header.service_us:
                seconds = answer.header.service_us * 1e-6
                shared.speeds.observe(name, attempt.part.work, seconds, now)
            return Result(attempt.part, answer.part_RH, attempt)
        status = Status(answer.header.status)
        if status is Status.INVALID_ARGUMENT:
            shared.metrics.outcomes.count(connection, Outcome.REFUSED)
            raise WrongRequestError(f"{name} refused a request of layer {self._inputs.layer}")
        if status in (Status.STALE_PLACEMENT, Status.EXPIRED):
            # It never had that expert, or has more to do than it can: nothing is wrong with it.
            return self._give_up(
                connection, f"{name}: answered {status.name}", "refused", blame=False
            )
        return self._give_up(connection, f"{name}: answered {status.name}", "refused")

    def _give_up(
        self, connection: Connection, reason: str, kind: str, *, blame: bool = True
    ) -> _Look:
        if blame:
            self._blame(connection)
        self._avoided[connection] = reason
        self._shared.metrics.outcomes.count(connection, failure(kind, blame=blame))
        self._shared.metrics.failovers.labels(kind).inc()
        return _Look.FAILED

    def _blame(self, connection: Connection) -> None:
        """Count a failure; what several parts of a call meet is one."""
        if connection in self._blamed:
            return
        self._blamed.add(connection)
        shared = self._shared
        servers = shared.replicas.view().placement.servers
        if shared.ejections.failed(connection.server_id, servers, shared.clock()):
            shared.metrics.ejections.labels("failures").inc()

    def _call_off(self, attempts: list[Attempt], results: list[Result]) -> None:
        """Nobody waits for these any more."""
        for attempt in tuple(attempts):
            attempt.connection.abandon(attempt.ticket, overdue=False)
            self._attempts.remove(attempt)
        for result in results:
            result.release()

    # -- races ----------------------------------------------------------------------------------------

    def _hedge(self, attempt: Attempt) -> None:
        """Ask other replicas for the same, if they have all of it and the budget allows it."""
        attempt.hedge_at = math.inf
        shared, part = self._shared, attempt.part
        view = shared.replicas.view()
        others_S = view.usable_S() & self._sound_S(view) & self._kept_S(view, shared.clock())
        others_S &= np.array([c is not attempt.connection for c in view.connections])
        wanted_TK = np.zeros_like(self._wanted_TK)
        wanted_TK[part.rows_R] = part.pairs_RK
        server_C, parts = self._plan(view, others_S, wanted_TK)
        if (server_C == NOWHERE).any() or not shared.hedges.spend(len(parts)):
            return
        rivals: list[Attempt] = []
        for other in parts:
            rival = self._send(view, other)
            if rival is None:
                break
            rivals.append(rival)
        if len(rivals) < len(parts):
            self._call_off(rivals, [])
            shared.hedges.give_back(len(parts) - len(rivals))
            return
        attempt.race = Race(attempt, rivals)
        for rival in rivals:
            rival.race, rival.hedge_at = attempt.race, math.inf

    def _settle_answered(self, attempt: Attempt, result: Result) -> None:
        race = attempt.race
        if race is None:
            self._results.append(result)
        elif attempt is race.primary:
            self._results.append(result)
            self._call_off(race.rivals, race.answered)
            self._shared.metrics.hedges.labels("lost").inc()
        else:
            race.rivals.remove(attempt)
            race.answered.append(result)
            if not race.rivals:
                self._results += race.answered
                self._attempts.remove(race.primary)
                race.primary.connection.abandon(race.primary.ticket, overdue=True)
                self._blame(race.primary.connection)
                self._shared.metrics.outcomes.count(race.primary.connection, Outcome.HEDGED_AWAY)
                self._shared.metrics.hedges.labels("won").inc()

    def _settle_failed(self, attempt: Attempt) -> list[Part]:
        """Returns what is to be sent again."""
        race = attempt.race
        if race is None:
            return [attempt.part]
        if attempt is race.primary:
            # Its rivals are what there is now.
            for rival in race.rivals:
                rival.race = None
            self._results += race.answered
            self._shared.metrics.hedges.labels("won").inc()
        else:
            race.rivals.remove(attempt)
            self._call_off(race.rivals, race.answered)
            race.primary.race = None
            self._shared.metrics.hedges.labels("failed").inc()
        return []
