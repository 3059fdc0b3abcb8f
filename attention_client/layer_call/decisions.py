"""The decisions of a layer call: whom to ask, how long to wait, what to send again, and whom to avoid.

A pure state machine: no clock, no I/O, and no call of a connection. `LayerCall` reports what happened to its
requests, and carries out what comes back.

    missing --sent--> in flight --answered--> answered
       ^                  |
       +------failed------+

Every wanted (token, expert) pair is in one of the three. Only a *hedge* has some in flight twice: a request
that takes unusually long is also sent to other replicas, and the first answer wins. A hedge may need several
requests (*rivals*), if the part's experts have their replicas on several servers; it wins when all of them
are answered.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from attention_client.dispatch.parts import Part, pairs_of, without
from attention_client.telemetry.request_outcomes import Outcome
from eaas.spares import SpareReplicas
from eaas.wire.slot import Status

if TYPE_CHECKING:
    from attention_client.connections.connection import Connection
    from attention_client.connections.messages import Ticket
    from eaas.telemetry.spans import ChildSpan

__all__ = ["Attempt", "Decisions", "Ended", "Failure", "Servers", "failure_of"]

# Interval between looks at a hedged request: either side may answer first, but a wait watches one of them.
_HEDGE_LOOK_S = 0.0005
_LEAST_TIME_S = 0.001
# A server's time for an answer doubles at most this many times in a call.
_MOST_DOUBLINGS = 30


class Failure(enum.Enum):
    """Why a request ended without a result.

    Attributes:
        label: Name in the metric of failovers.
        outcome: What the monitor is told.
        is_fault: Whether it counts towards ejecting the server from all calls.
        is_avoided: Whether the rest of the call asks other servers first.
    """

    # The server gets no more requests, and its next process starts with a clean record.
    LOST = "lost", Outcome.LOST, False, True
    CORRUPT = "corrupt", Outcome.CORRUPT, True, True
    TIMEOUT = "timeout", Outcome.TIMED_OUT, True, True
    ERROR = "refused", Outcome.FAILED, True, True
    # It lacks an expert or is overloaded, but is not faulty.
    DECLINED = "refused", Outcome.REFUSED, False, True
    # It has lost a spare replica, but may be the only one with other experts of the part.
    SPARE_GONE = "refused", Outcome.REFUSED, False, False

    def __init__(self, label: str, outcome: Outcome, is_fault: bool, is_avoided: bool) -> None:
        self.label = label
        self.outcome = outcome
        self.is_fault = is_fault
        self.is_avoided = is_avoided


def failure_of(status: Status, *, has_spares: bool) -> Failure | None:
    """Classify a refusal. `has_spares`: the server was thought to hold spare replicas.

    None: the request itself is wrong, so every server would refuse it.
    """
    if status is Status.INVALID_ARGUMENT:
        return None
    if status is Status.STALE_PLACEMENT:
        return Failure.SPARE_GONE if has_spares else Failure.DECLINED
    return Failure.DECLINED if status is Status.EXPIRED else Failure.ERROR


@dataclass(eq=False, slots=True)
class Attempt:
    """One request of a layer call. Times are monotonic seconds.

    Attributes:
        part: Tokens and experts asked for.
        connection: Connection to the server.
        ticket: The connection's handle of the request.
        sent_at: When it was sent.
        hedge_at: When to also send the part to other replicas; infinity: never.
        expires_at: When to give this request up and send the part to another replica.
        hedge: The hedge that it is part of, if any.
        trace: Its span, if it is traced.
        spares: The spare replicas among which it was chosen.
        part_RH: float32 (R, H), its result: in the slot, copied out, or None.
        holds_slot: Whether `part_RH` is in the slot.
    """

    part: Part
    connection: Connection
    ticket: Ticket
    sent_at: float
    hedge_at: float
    expires_at: float
    hedge: _Hedge | None = None
    trace: ChildSpan | None = None
    spares: SpareReplicas = field(default_factory=SpareReplicas)
    part_RH: npt.NDArray[np.float32] | None = None
    holds_slot: bool = False


@dataclass(eq=False, slots=True)
class _Hedge:
    """A late request, its rivals in flight, and those that have answered."""

    late: Attempt
    rivals: list[Attempt]
    answered: list[Attempt] = field(default_factory=list)


class Servers(NamedTuple):
    """What a client knows of each server of a placement.

    Attributes:
        connections: None: not connected.
        usable: Whether the connection is not lost.
        owing: Whether an overdue request is unanswered.
        ejected: Whether it failed or was slow in former calls.
    """

    connections: Sequence[Connection | None]
    usable: Sequence[bool]
    owing: Sequence[bool]
    ejected: Sequence[bool]


class Ended(NamedTuple):
    """What to do after a request has ended.

    Attributes:
        call_off: Stop waiting for these requests, which count for nothing.
        unused: Free the results of these.
        beaten: Its rivals were faster: stop waiting for this request, which counts as overdue.
        hedge: "won", "lost" or "failed": how its hedge ended; None: it had none, or the hedge goes on.
        blamed: Servers to count a fault of; each at most once in a call.
    """

    call_off: Sequence[Attempt] = ()
    unused: Sequence[Attempt] = ()
    beaten: Attempt | None = None
    hedge: str | None = None
    blamed: Sequence[Connection] = ()


class Decisions:
    """The state of one layer call's pairs and requests.

    Args:
        wanted_TK: Pairs to compute.
        deadline: End of the call, monotonic seconds.
        in_flight: Requests already sent, which then hold all wanted pairs.

    Attributes:
        missing_TK: Pairs still to send; None: none.
        in_flight: Requests without an answer.
        answered: Requests whose results are to be summed.
        reasons: Why each avoided server failed in this call. It is asked again only as a last resort.
    """

    def __init__(
        self,
        wanted_TK: npt.NDArray[np.bool_],
        deadline: float,
        in_flight: Iterable[Attempt] = (),
    ) -> None:
        self._wanted_TK = wanted_TK
        self._deadline = deadline
        self.in_flight = list(in_flight)
        self.missing_TK: npt.NDArray[np.bool_] | None = None if self.in_flight else wanted_TK
        self.answered: list[Attempt] = []
        self.reasons: dict[Connection, str] = {}
        self._timeouts: Counter[Connection] = Counter()
        self._blamed: set[Connection] = set()

    @property
    def is_complete(self) -> bool:
        """Whether every wanted pair has a result."""
        return self.missing_TK is None and not self.in_flight

    # -- whom to ask ----------------------------------------------------------------------------------

    def preferred(self, servers: Servers) -> list[bool]:
        """Return the servers to ask first, and for hedges: `healthy` and not ejected."""
        return [
            healthy and not ejected
            for healthy, ejected in zip(self.healthy(servers), servers.ejected, strict=True)
        ]

    def healthy(self, servers: Servers) -> list[bool]:
        """Return the servers to ask next: an ejected server is better than one that failed just now."""
        return [
            usable and not owes and connection not in self.reasons
            for connection, usable, owes in zip(
                servers.connections, servers.usable, servers.owing, strict=True
            )
        ]

    def needs_pause(self, servers: Servers) -> bool:
        """Return whether to pause before asking all others: one of them failed in this call."""
        return any(connection in self.reasons for connection in servers.connections)

    # -- how long to wait -----------------------------------------------------------------------------

    def is_over(self, now: float) -> bool:
        """Return whether the call's time is over."""
        return now >= self._deadline

    def left_s(self, now: float) -> float:
        """Return what is left of the call's time, and a little if nothing is."""
        return max(self._deadline - now, _LEAST_TIME_S)

    def patience_s(self, connection: Connection, usual_s: float, now: float) -> float:
        """Return how long a new request may take; `usual_s` is the server's budget for such a request.

        It doubles with every timeout, because the only replica may have become slower than ever before.
        """
        doublings = min(self._timeouts[connection], _MOST_DOUBLINGS)
        return min(usual_s * 2.0**doublings, self.left_s(now))

    def late(self, now: float) -> list[Attempt]:
        """Return the requests to hedge now. Each is returned once."""
        late = [attempt for attempt in self.in_flight if attempt.hedge_at <= now]
        for attempt in late:
            attempt.hedge_at = math.inf
        return late

    def due_at(self, now: float) -> float:
        """Return when to look at the requests again, unless one is answered before."""
        due_at = min(min(a.expires_at, a.hedge_at) for a in self.in_flight)
        if any(attempt.hedge is not None for attempt in self.in_flight):
            due_at = min(due_at, now + _HEDGE_LOOK_S)
        return due_at

    # -- events ---------------------------------------------------------------------------------------

    def sent(self, attempts: Sequence[Attempt], *, is_all: bool) -> None:
        """Some missing pairs were sent. `is_all`: all of them."""
        assert self.missing_TK is not None
        self.in_flight += attempts
        parts = [attempt.part for attempt in attempts]
        self.missing_TK = None if is_all else without(self.missing_TK, parts)

    def hedged(self, late: Attempt, rivals: list[Attempt]) -> None:
        """A late request's pairs were also sent to others. Rivals are not hedged again."""
        self.in_flight += rivals
        late.hedge = _Hedge(late, list(rivals))
        for rival in rivals:
            rival.hedge, rival.hedge_at = late.hedge, math.inf

    def ended(self, attempt: Attempt, failure: Failure | None = None, reason: str = "") -> Ended:
        """A request in flight was answered with a result, or failed for this reason."""
        self.in_flight.remove(attempt)
        if failure is None:
            return self._answered(attempt)
        if failure is Failure.TIMEOUT:
            self._timeouts[attempt.connection] += 1
        if failure.is_avoided:
            self.reasons[attempt.connection] = reason
        blamed = self._blame(attempt.connection) if failure.is_fault else ()
        return self._failed(attempt)._replace(blamed=blamed)

    def lost_result(self, attempt: Attempt) -> None:
        """A result was overwritten before it was copied: its pairs are missing again."""
        self.answered.remove(attempt)
        self._miss(attempt.part)

    def lost_results(self) -> None:
        """A result was overwritten while all were summed: every pair is missing again."""
        self.answered = []
        self.missing_TK = self._wanted_TK

    def take_all(self) -> tuple[list[Attempt], list[Attempt]]:
        """End the call: return, and forget, the requests in flight and those with a result."""
        answered = self.answered + [
            rival
            for attempt in self.in_flight
            if attempt.hedge is not None and attempt is attempt.hedge.late
            for rival in attempt.hedge.answered
        ]
        in_flight, self.in_flight, self.answered = self.in_flight, [], []
        return in_flight, answered

    def _answered(self, attempt: Attempt) -> Ended:
        hedge = attempt.hedge
        if hedge is None:
            self.answered.append(attempt)
            return Ended()
        if attempt is hedge.late:
            self.answered.append(attempt)
            self._drop(hedge.rivals)
            return Ended(call_off=hedge.rivals, unused=hedge.answered, hedge="lost")
        hedge.rivals.remove(attempt)
        hedge.answered.append(attempt)
        if hedge.rivals:
            return Ended()
        self.answered += hedge.answered
        self._drop([hedge.late])
        blamed = self._blame(hedge.late.connection)
        return Ended(beaten=hedge.late, hedge="won", blamed=blamed)

    def _failed(self, attempt: Attempt) -> Ended:
        """Go on with the other side of a hedge, or send the pairs again."""
        hedge = attempt.hedge
        if hedge is None:
            self._miss(attempt.part)
            return Ended()
        if attempt is hedge.late:
            for rival in hedge.rivals:
                rival.hedge = None
            self.answered += hedge.answered
            return Ended(hedge="won")
        hedge.rivals.remove(attempt)
        hedge.late.hedge = None
        self._drop(hedge.rivals)
        return Ended(call_off=hedge.rivals, unused=hedge.answered, hedge="failed")

    def _drop(self, attempts: Iterable[Attempt]) -> None:
        for attempt in attempts:
            self.in_flight.remove(attempt)

    def _blame(self, connection: Connection) -> Sequence[Connection]:
        if connection in self._blamed:
            return ()
        self._blamed.add(connection)
        return (connection,)

    def _miss(self, part: Part) -> None:
        part_TK = pairs_of(part, self._wanted_TK.shape)
        self.missing_TK = part_TK if self.missing_TK is None else self.missing_TK | part_TK
