"""How long a server takes to answer, how long it gets, and when a replica is asked beside it."""

from __future__ import annotations

import threading
from collections import Counter, deque

__all__ = ["HedgeBudget", "ServiceTimes"]


class ServiceTimes:
    """Learned seconds per call of one server, by size of the call (powers of two of its tokens).

    A fixed guess is either too long for one token or too short for a prefill, hence sizes.
    """

    _COLD_S = 2.0
    # Six times the usual is patience enough for a short call; a long one varies less, and doubling is.
    _MARGIN, _SHORT_S, _LONG_MARGIN = 6.0, 0.2, 2.0
    # Answers, in units of the usual time of their size, that say what the slowest twentieth takes.
    _WINDOW, _LEAST_KNOWN, _SORT_EACH, _TAIL = 100, 20, 10, 0.95

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._answers: Counter[int] = Counter()
        self._recent: deque[float] = deque(maxlen=self._WINDOW)
        self._unsorted = self._SORT_EACH
        self._tail: float | None = None

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from one answer (exponential average; a slower one counts more, to be on the safe side)."""
        size = rows.bit_length()
        before = self._seconds.get(size, seconds)
        self._answers[size] += 1
        # The first ones are plainly averaged: the very first is a warm-up, and is to be forgotten soon.
        weight = 0.5 if seconds > before else max(0.1, 1.0 / self._answers[size])
        usual = before + weight * (seconds - before)
        # Other threads may be reading, so that a new size makes a new table; an observation lost to another
        # one is no harm.
        if size in self._seconds:
            self._seconds[size] = usual
        else:
            self._seconds = {**self._seconds, size: usual}
        self._remember(seconds / before if before > 0 else 1.0)

    def observe_bound(self, rows: int, seconds: float) -> None:
        """Learn from an answer that was found late: it took no longer than that."""
        known = self._seconds.get(rows.bit_length())
        if known is None or seconds < known:
            self.observe(rows, seconds)

    def _remember(self, ratio: float) -> None:
        self._recent.append(ratio)
        self._unsorted += 1
        if len(self._recent) >= self._LEAST_KNOWN and self._unsorted >= self._SORT_EACH:
            self._unsorted = 0
            ordered = sorted(self._recent)
            self._tail = ordered[int(self._TAIL * (len(ordered) - 1))]

    def budget(self, rows: int, least_s: float, most_s: float) -> float:
        """Seconds to wait for a call of `rows` tokens before another replica is asked instead.

        A server that was never heard gets time to warm up; a size never seen is scaled from the nearest.
        """
        expected = self._expected_s(rows)
        if expected is None:
            return min(max(self._COLD_S, least_s), most_s)
        patience_s = min(self._MARGIN * expected, max(self._SHORT_S, self._LONG_MARGIN * expected))
        return min(max(least_s, patience_s), most_s)

    def tail_s(self, rows: int) -> float | None:
        """Seconds in which 95 % of the calls of `rows` tokens were answered; None until that is known."""
        expected, tail = self._expected_s(rows), self._tail
        return None if expected is None or tail is None else expected * tail

    def _expected_s(self, rows: int) -> float | None:
        seconds = self._seconds
        if not seconds:
            return None
        size = rows.bit_length()
        exactly = seconds.get(size)
        if exactly is not None:
            return exactly
        nearest = min(seconds, key=lambda known: abs(known - size))
        return seconds[nearest] * 2.0 ** max(0, size - nearest)


class HedgeBudget:
    """How many requests may be sent beside others that are still waited for.

    A token bucket: each request adds a share of a hedge, a hedge takes a whole one. It starts empty, so at
    no time were there more hedges than that share of the requests. For any number of threads.

    Args:
        share: Of the requests, 0 to 1.
        burst: Hedges that can be saved up.
    """

    def __init__(self, share: float, burst: float = 10.0) -> None:
        self._share = share
        self._burst = burst
        self._tokens = 0.0
        self._lock = threading.Lock()

    def earn(self) -> None:
        """A request was sent."""
        with self._lock:
            self._tokens = min(self._tokens + self._share, self._burst)

    def spend(self, requests: int) -> bool:
        """Take so many hedges if they are there."""
        with self._lock:
            if self._tokens < requests:
                return False
            self._tokens -= requests
            return True

    def give_back(self, requests: int) -> None:
        """So many were not sent after all."""
        with self._lock:
            self._tokens = min(self._tokens + requests, self._burst)
