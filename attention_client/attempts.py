"""Requests of a layer call that are in flight, and the races between a request and its hedge.

A request that takes unusually long is *hedged*: what it asks for is sent to other replicas too, and the first
answer wins. The hedge may need several requests, since the replicas of a part's experts may be on several
servers; it wins when all of them are answered.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from attention_client.connection import Connection
from attention_client.dispatch.parts import Part
from attention_client.messages import Ticket
from attention_client.tracing import DispatchTrace

__all__ = ["Attempt", "Race", "Result"]

_NO_ROWS = np.empty((0, 0), dtype=np.float32)


@dataclass(eq=False, slots=True)
class Attempt:
    """A part of a layer call that a server was asked for.

    Attributes:
        part: What was asked for.
        connection: Of the server.
        ticket: Of the connection.
        sent_at: Monotonic seconds.
        hedge_at: When to ask a replica beside it; infinity: never.
        expires_at: When to ask a replica instead of it.
        race: With its rivals, if there are any.
        trace: Its span, where it is traced.
    """

    part: Part
    connection: Connection
    ticket: Ticket
    sent_at: float
    hedge_at: float
    expires_at: float
    race: Race | None = None
    trace: DispatchTrace | None = None


@dataclass(eq=False, slots=True)
class Result:
    """An answered part: in its slot until it is banked or released.

    Attributes:
        part: What was asked for.
        part_RH: float32 (R, H); without rows once it was released.
        attempt: Whose slot it stands in; None once it has been copied.
        server_id: Who computed it.
    """

    part: Part
    part_RH: npt.NDArray[np.float32]
    attempt: Attempt | None
    server_id: str

    def bank(self) -> bool:
        """Copy the result and free its slot. Says whether what was copied is right."""
        if self.attempt is None:
            return True
        copied_RH = self.part_RH.copy()
        is_right = self.release()
        self.part_RH = copied_RH
        return is_right

    def release(self) -> bool:
        """Free the slot after the result was read. Says whether what was read is right."""
        attempt, self.attempt = self.attempt, None
        # A race and its attempts refer to each other: they stay until Python looks for such circles, and with
        # this view the memory of a server that is long gone would.
        self.part_RH = _NO_ROWS
        return attempt is None or attempt.connection.release(attempt.ticket)


@dataclass(eq=False, slots=True)
class Race:
    """An attempt, and those that ask for the same elsewhere.

    Attributes:
        primary: The attempt that took too long.
        rivals: The hedge's attempts that are still in flight.
        answered: The hedge's results so far.
    """

    primary: Attempt
    rivals: list[Attempt]
    answered: list[Result] = field(default_factory=list)
