"""Hedging of late requests in a layer call: pure state machine (events in, instructions out, no I/O)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from attention_client.layer_call.attempts import Attempt, Hedge, Result

__all__ = ["Settled", "begin", "settle_answered", "settle_failed"]


@dataclass(frozen=True, eq=False)
class Settled:
    """Instructions for the layer call after one side of a hedge has ended.

    Attributes:
        results: Use these.
        call_off: Stop waiting for these requests.
        release: Free these results.
        beaten: The late request, if the rivals won; it counts as overdue.
        outcome: How the hedge ended: "won", "lost" or "failed"; None while it is open.
    """

    results: list[Result] = field(default_factory=list)
    call_off: list[Attempt] = field(default_factory=list)
    release: list[Result] = field(default_factory=list)
    beaten: Attempt | None = None
    outcome: str | None = None


def begin(primary: Attempt, rivals: list[Attempt]) -> None:
    """Start a hedge: link a late request to its rivals, already sent. Rivals are not hedged again."""
    primary.hedge = Hedge(primary, rivals)
    for rival in rivals:
        rival.hedge, rival.hedge_at = primary.hedge, math.inf


def settle_answered(hedge: Hedge, attempt: Attempt, result: Result) -> Settled:
    """Decide which results to use after an answer: the late request's, or the rivals' once all answered."""
    if attempt is hedge.primary:
        return Settled([result], hedge.rivals, hedge.answered, outcome="lost")
    hedge.rivals.remove(attempt)
    hedge.answered.append(result)
    if hedge.rivals:
        return Settled()
    return Settled(hedge.answered, beaten=hedge.primary, outcome="won")


def settle_failed(hedge: Hedge, attempt: Attempt) -> Settled:
    """Go on with the other side when one side fails. Nothing is sent again, because it is in flight."""
    if attempt is hedge.primary:
        for rival in hedge.rivals:
            rival.hedge = None
        return Settled(hedge.answered, outcome="won")
    hedge.rivals.remove(attempt)
    hedge.primary.hedge = None
    return Settled(call_off=hedge.rivals, release=hedge.answered, outcome="failed")
