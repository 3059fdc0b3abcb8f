"""Rates between two readings of processes' totals, for the autoscaler and live knobs. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from eaas.types import Member

__all__ = ["LatencyMeter", "Utilizations"]

# A batch counts when it ends and may have begun before the last reading, so a share may exceed 1. A higher
# share than this means that the stored total was outdated.
_PLAUSIBLE = 1.5

_Life = tuple[str, int]


class Utilizations:
    """Computes the utilisation of each expert server between two readings of the autoscaler."""

    def __init__(self) -> None:
        # Time of the report, and busy seconds.
        self._known: dict[_Life, tuple[float, float]] = {}

    def read(self, servers: Iterable[Member], now: float) -> dict[str, float]:
        """Return utilisations, 0 to 1, by id, of servers that have reported twice; others are unmeasured.

        Args:
            servers: With their current `busy_s` and `silence_s`.
            now: Monotonic seconds.
        """
        shares, known = {}, {}
        for m in servers:
            life = (m.id, m.incarnation)
            said_at = now - m.silence_s
            known[life] = (said_at, m.busy_s)
            before_at, before_s = self._known.get(life, (said_at, m.busy_s))
            if m.busy_s < before_s:
                # A restarted monitor has not received a report from the server yet.
                known[life] = (before_at, before_s)
            elif said_at > before_at:
                share = (m.busy_s - before_s) / (said_at - before_at)
                if share <= _PLAUSIBLE:
                    shares[m.id] = min(1.0, share)
        self._known = known
        return shares


class LatencyMeter:
    """Computes the mean time between two tokens of a request, over all clients, between two readings."""

    def __init__(self) -> None:
        self._known: Mapping[_Life, tuple[float, float]] = {}

    def read(self, counted: Mapping[_Life, tuple[float, float]]) -> float | None:
        """Return the mean seconds between two tokens since the last reading; None: no tokens.

        Args:
            counted: Sum (seconds) and number of the times since the client's start, by (id, incarnation) of
                each client that answered.
        """
        seconds = tokens = 0.0
        for life in counted.keys() & self._known.keys():
            seconds += counted[life][0] - self._known[life][0]
            tokens += counted[life][1] - self._known[life][1]
        self._known = dict(counted)
        return seconds / tokens if tokens > 0 else None
