"""Requests of a layer call that are in flight to expert servers, and their hedges.

A request that takes unusually long is *hedged*: the same part is sent to other replicas, and the first answer
wins. A hedge may need several requests if the part's experts have their replicas on several servers; it wins
when all of them are answered.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from attention_client.connections.connection import Connection
from attention_client.connections.messages import Ticket
from attention_client.dispatch.parts import Part
from eaas.spares import SpareReplicas

if TYPE_CHECKING:
    from eaas.telemetry.spans import ChildSpan

__all__ = ["Attempt", "Hedge", "Result"]

_NO_ROWS = np.empty((0, 0), dtype=np.float32)


@dataclass(eq=False, slots=True)
class Attempt:
    """One request in flight: a part of a layer call sent to an expert server. Times are monotonic seconds.

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
    """

    part: Part
    connection: Connection
    ticket: Ticket
    sent_at: float
    hedge_at: float
    expires_at: float
    hedge: Hedge | None = None
    trace: ChildSpan | None = None
    spares: SpareReplicas = field(default_factory=SpareReplicas)

    def end_trace(self, outcome: str) -> None:
        """End the request's trace span with this outcome, if it is traced."""
        if self.trace is not None:
            self.trace.attributes["eaas.outcome"] = outcome
            self.trace.end()


@dataclass(eq=False, slots=True)
class Result:
    """An expert server's answer to one part, in its slot until it is copied out or released.

    Attributes:
        part: The part that was asked for.
        part_RH: float32 (R, H); empty after the release.
        attempt: The request whose slot holds the result; None once the slot is free.
        server_id: Server that computed it.
    """

    part: Part
    part_RH: npt.NDArray[np.float32]
    attempt: Attempt | None
    server_id: str

    def copy_out(self) -> bool:
        """Copy the result and free its slot for resends. Returns False if the copy is unusable."""
        if self.attempt is None:
            return True
        copied_RH = self.part_RH.copy()
        is_right = self.release()
        self.part_RH = copied_RH
        return is_right

    def release(self) -> bool:
        """Free the slot of a result read or not needed. Returns False if what was read is unusable."""
        attempt, self.attempt = self.attempt, None
        # A hedge and its attempts form a reference cycle, which would keep this view, and so the arena of a
        # dead server, alive until the next garbage collection.
        self.part_RH = _NO_ROWS
        return attempt is None or attempt.connection.release(attempt.ticket)


@dataclass(eq=False, slots=True)
class Hedge:
    """A late attempt and its rivals: attempts at the same part on other servers.

    Attributes:
        primary: The late attempt.
        rivals: Rivals still in flight.
        answered: Results of the rivals so far.
    """

    primary: Attempt
    rivals: list[Attempt]
    answered: list[Result] = field(default_factory=list)
