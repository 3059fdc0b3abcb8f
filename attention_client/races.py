"""Races of a late request and its hedge: what follows when a side ends. Events in, instructions out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from attention_client.attempts import Attempt, Race, Result

__all__ = ["Settled", "begin", "settle_answered", "settle_failed"]


@dataclass(frozen=True, eq=False)
class Settled:
    """What is to be done after one side of a race has ended.

    Attributes:
        results: To be used.
        call_off: Requests that nobody waits for any more.
        release: Results that nobody needs any more.
        beaten: The late request, when its hedge has won: it had its time.
        outcome: For the counter: "won", "lost" or "failed" (the hedge); None while the race goes on.
    """

    results: list[Result] = field(default_factory=list)
    call_off: list[Attempt] = field(default_factory=list)
    release: list[Result] = field(default_factory=list)
    beaten: Attempt | None = None
    outcome: str | None = None


def begin(primary: Attempt, rivals: list[Attempt]) -> None:
    """A late request was sent elsewhere, too. No rival is hedged in turn."""
    primary.race = Race(primary, rivals)
    for rival in rivals:
        rival.race, rival.hedge_at = primary.race, math.inf


def settle_answered(race: Race, attempt: Attempt, result: Result) -> Settled:
    """One of them has a result."""
    if attempt is race.primary:
        return Settled([result], race.rivals, race.answered, outcome="lost")
    race.rivals.remove(attempt)
    race.answered.append(result)
    if race.rivals:
        return Settled()
    return Settled(race.answered, beaten=race.primary, outcome="won")


def settle_failed(race: Race, attempt: Attempt) -> Settled:
    """One of them ended without a result. Nothing is to be sent again: the other side is still there."""
    if attempt is race.primary:
        for rival in race.rivals:
            rival.race = None
        return Settled(race.answered, outcome="won")
    race.rivals.remove(attempt)
    race.primary.race = None
    return Settled(call_off=race.rivals, release=race.answered, outcome="failed")
