"""How long a server gets to answer before a replica is asked too."""

from __future__ import annotations

__all__ = ["ServiceTimes"]


class ServiceTimes:
    """Learned seconds per call of one server, by size of the call (powers of two of its tokens).

    A fixed guess is either too long for one token or too short for a prefill, hence sizes.
    """

    _COLD_S = 2.0
    # Six times the usual is patience enough for a short call; a long one varies less, and doubling is.
    _MARGIN, _SHORT_S, _LONG_MARGIN = 6.0, 0.2, 2.0

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from one answer (exponential average; a slower one counts more, to be on the safe side)."""
        size = rows.bit_length()
        before = self._seconds.get(size, seconds)
        weight = 0.5 if seconds > before else 0.1
        # Made anew, since other threads may be reading; an observation lost to another one is no harm.
        self._seconds = {**self._seconds, size: before + weight * (seconds - before)}

    def budget(self, rows: int, least_s: float, most_s: float) -> float:
        """Seconds to wait for a call of `rows` tokens before another replica is asked too.

        A server that was never heard gets time to warm up; a size never seen is scaled from the nearest.
        """
        seconds = self._seconds
        if not seconds:
            return min(max(self._COLD_S, least_s), most_s)
        size = rows.bit_length()
        nearest = min(seconds, key=lambda known: abs(known - size))
        expected = seconds[nearest] * 2.0 ** max(0, size - nearest)
        patience_s = min(self._MARGIN * expected, max(self._SHORT_S, self._LONG_MARGIN * expected))
        return min(max(least_s, patience_s), most_s)
