"""How long a client waits for a server's answer, from measured service times; and its budget of hedges."""

from __future__ import annotations

import threading
from collections import Counter, deque

import numpy as np
import numpy.typing as npt

from attention_client.dispatch import _dispatch

__all__ = ["HedgeBudget", "ServiceTimes"]


class ServiceTimes:
    """Measured seconds per request of one expert server, by size class (bit length of the number of tokens).

    One fixed value would be too long for one token or too short for a prefill.
    """

    _COLD_S = 2.0
    # Recent answers, relative to the usual time of their size, whose 95th percentile is the tail.
    _WINDOW, _LEAST_KNOWN, _SORT_EACH, _TAIL = 100, 20, 10, 0.95
    # Where times hardly vary, the tail is close to the usual time, and hedges there would only spend the
    # budget that a server which becomes slow needs.
    _LEAST_TAIL = 1.5

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._answers: Counter[int] = Counter()
        self._recent: deque[float] = deque(maxlen=self._WINDOW)
        self._unsorted = self._SORT_EACH
        self._tail: float | None = None

    def observe(self, rows: int, seconds: float) -> None:
        """Record one answer's time, for later budgets and hedges. Slower answers count more, for safety."""
        size = rows.bit_length()
        before = self._seconds.get(size, seconds)
        self._answers[size] += 1
        # Plain average at first, so that the warm-up is soon forgotten.
        weight = 0.5 if seconds > before else max(0.1, 1.0 / self._answers[size])
        usual = before + weight * (seconds - before)
        # Other threads may read, so a new size makes a new dict. Losing a concurrent update does no harm.
        if size in self._seconds:
            self._seconds[size] = usual
        else:
            self._seconds = {**self._seconds, size: usual}
        self._remember(seconds / before if before > 0 else 1.0)

    def observe_bound(self, rows: int, seconds: float) -> None:
        """Record the time of an answer found late; used only if shorter than known, or the first."""
        known = self._seconds.get(rows.bit_length())
        if known is None or seconds < known:
            self.observe(rows, seconds)

    def _remember(self, ratio: float) -> None:
        self._recent.append(ratio)
        self._unsorted += 1
        if len(self._recent) >= self._LEAST_KNOWN and self._unsorted >= self._SORT_EACH:
            self._unsorted = 0
            ordered = sorted(self._recent)
            self._tail = max(ordered[int(self._TAIL * (len(ordered) - 1))], self._LEAST_TAIL)

    def budget(self, rows: int, least_s: float, most_s: float) -> float:
        """Return the seconds to wait for a request of `rows` tokens before asking another replica instead.

        A server without measurements gets time to warm up; an unknown size is scaled from the nearest one.
        """
        expected = self._expected_s(rows)
        if expected is None:
            return min(max(self._COLD_S, least_s), most_s)
        return _dispatch.budget_s(expected, least_s, most_s)

    def hedge_s(self, rows: int) -> float | None:
        """Return the seconds after which a request is hedged; None while unknown.

        They are the 95th percentile of its time, and at least 1.5 times its usual time and two milliseconds.
        """
        expected, tail = self._expected_s(rows), self._tail
        return None if expected is None or tail is None else _dispatch.hedge_s(expected, tail)

    def table(self) -> tuple[npt.NDArray[np.float64], float]:
        """Return the usual seconds by size class (0: unknown) and the tail as a multiple (0: unknown).

        For compiled layer calls, which leave requests of an unknown size to `LayerCall`.
        """
        expected = np.zeros(_dispatch.SIZE_CLASSES)
        for size, seconds in self._seconds.items():
            expected[size] = seconds
        return expected, self._tail or 0.0

    def _expected_s(self, rows: int) -> float | None:
        seconds = self._seconds
        if not seconds:
            return None
        size = rows.bit_length()
        known_s = seconds.get(size)
        if known_s is not None:
            return known_s
        nearest = min(seconds, key=lambda known: abs(known - size))
        return seconds[nearest] * 2.0 ** max(0, size - nearest)


class HedgeBudget:
    """Token bucket that limits a client's hedges to a share of its requests. Thread-safe.

    Each request adds `share` tokens and each hedge takes one. The bucket starts empty, so hedges never exceed
    that share of the requests. At most ten tokens are saved up.

    Args:
        share: Hedges per request, 0 to 1.
    """

    _BURST = 10.0

    def __init__(self, share: float) -> None:
        self._share = share
        self._tokens = 0.0
        self._lock = threading.Lock()

    def earn(self, requests: int = 1) -> None:
        """Add the tokens that requests earn; called for those sent, hedges excepted."""
        with self._lock:
            self._tokens = min(self._tokens + requests * self._share, self._BURST)

    def spend(self, requests: int) -> bool:
        """Take the tokens for a hedge's requests. Returns False, taking none, if too few: no hedge."""
        with self._lock:
            if self._tokens < requests:
                return False
            self._tokens -= requests
            return True

    def give_back(self, requests: int) -> None:
        """Put back tokens that `spend` took for hedge requests that could not be sent."""
        with self._lock:
            self._tokens = min(self._tokens + requests, self._BURST)
