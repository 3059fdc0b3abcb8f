"""Instructions after one side of a hedge ends: events in, instructions out, no I/O."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from attention_client.layer_call.attempts import Attempt, Hedge, Result

__all__ = ["Settled", "begin", "settle_answered", "settle_failed"]


@dataclass(frozen=True, eq=False)
class Settled:
    """Instructions after one side of a hedge has ended.

    Attributes:
        results: Use these.
        call_off: Stop waiting for these requests.
        release: Free these results.
        beaten: The late request, if the rivals won; it counts as overdue.
        outcome: How the hedge ended: "won", "lost" or "failed"; None while it goes on.
    """

    results: list[Result] = field(default_factory=list)
    call_off: list[Attempt] = field(default_factory=list)
    release: list[Result] = field(default_factory=list)
    beaten: Attempt | None = None
    outcome: str | None = None


def begin(primary: Attempt, rivals: list[Attempt]) -> None:
    """Link a late request to its rivals. Rivals are not hedged again."""
    primary.hedge = Hedge(primary, rivals)
    for rival in rivals:
        rival.hedge, rival.hedge_at = primary.hedge, math.inf


def settle_answered(hedge: Hedge, attempt: Attempt, result: Result) -> Settled:
    """Handle an answer to the late request or to a rival."""
    if attempt is hedge.primary:
        return Settled([result], hedge.rivals, hedge.answered, outcome="lost")
    hedge.rivals.remove(attempt)
    hedge.answered.append(result)
    if hedge.rivals:
        return Settled()
    return Settled(hedge.answered, beaten=hedge.primary, outcome="won")


def settle_failed(hedge: Hedge, attempt: Attempt) -> Settled:
    """Handle the failure of one side. Nothing is sent again: the other side is still in flight."""
    if attempt is hedge.primary:
        for rival in hedge.rivals:
            rival.hedge = None
        return Settled(hedge.answered, outcome="won")
    hedge.rivals.remove(attempt)
    hedge.primary.hedge = None
    return Settled(call_off=hedge.rivals, release=hedge.answered, outcome="failed")
