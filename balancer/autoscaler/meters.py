"""From what processes have counted since they began to what they did between two looks. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from eaas.types import Member

__all__ = ["LatencyMeter", "Utilizations"]

# A batch counts when it has ended, and may have begun before the last look. More than this is no measurement:
# the counter that was known was an older one.
_PLAUSIBLE = 1.5

_Life = tuple[str, int]


class Utilizations:
    """The part of the time for which each expert server was busy, between two looks."""

    def __init__(self) -> None:
        # When it said so, and what.
        self._known: dict[_Life, tuple[float, float]] = {}

    def read(self, servers: Iterable[Member], now: float) -> dict[str, float]:
        """Utilisations, 0 to 1, by id, of those servers that were heard twice.

        Args:
            servers: With the loads of this moment (`busy_s`, `silence_s`).
            now: Monotonic seconds of this moment.
        """
        shares, known = {}, {}
        for m in servers:
            life = (m.id, m.incarnation)
            said_at = now - m.silence_s
            known[life] = (said_at, m.busy_s)
            before_at, before_s = self._known.get(life, (said_at, m.busy_s))
            if m.busy_s < before_s:
                # A monitor that was restarted has not heard of it yet.
                known[life] = (before_at, before_s)
            elif said_at > before_at:
                share = (m.busy_s - before_s) / (said_at - before_at)
                if share <= _PLAUSIBLE:
                    shares[m.id] = min(1.0, share)
        self._known = known
        return shares


class LatencyMeter:
    """The mean time between two tokens of a request, over all clients, between two looks."""

    def __init__(self) -> None:
        self._known: Mapping[_Life, tuple[float, float]] = {}

    def read(self, counted: Mapping[_Life, tuple[float, float]]) -> float | None:
        """Seconds; None where no token came.

        Args:
            counted: By (id, incarnation) of each client that answered, the sum of the times and how many they
                were, since it began.
        """
        seconds = tokens = 0.0
        for life in counted.keys() & self._known.keys():
            seconds += counted[life][0] - self._known[life][0]
            tokens += counted[life][1] - self._known[life][1]
        self._known = dict(counted)
        return seconds / tokens if tokens > 0 else None
