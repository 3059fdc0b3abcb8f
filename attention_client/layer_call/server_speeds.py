"""Expert servers' speeds as one client measures them, for load-aware dispatch and ejection.

Each answer states how long the server had the request, so delays of the network or of a client that polls
late are not counted; and how much of that time went to other requests. Those are other clients' mostly, so
the usual one is a server's backlog for dispatch, and it does not make the server slow.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attention_client.dispatch import Load
from attention_client.layer_call.load_fit import LoadFit

__all__ = ["Ejections", "Speeds"]

Float = npt.NDArray[np.float64]

# Half-life of a measurement, so that a rarely asked server gets another chance.
_HALF_LIFE_S = 10.0
# Answers in a median, because a server's first answers, and some later ones, take unusually long.
_WINDOW = 7
_LEAST_KNOWN = 3
# A server that takes this multiple of the usual time is ejected, but only after this many answers.
_SLOW_FACTOR = 5.0
_SLOW_ANSWERS = 5
# A server that was ejected as slow is on trial afterwards. The first answer may take long for other reasons.
_TRIAL_ANSWERS = 2
# Least weight of an answer in a server's usual queue. What waited at one moment is gone at the next, and
# clients that follow it meet elsewhere (docs/performance.md). The mean of many answers tells which servers
# others use.
_QUEUE_WEIGHT = 0.02
# The least time that an answer counts as.
_LEAST_S = 1e-6
# A server cannot state longer queues than any request is worth.
_MOST_QUEUE_S = 10.0
# How long computed rates are reused.
_REFRESH_S = 0.005
# A server that delays a call by less than this is not slow, however slow it is relative to others.
_LEAST_EXCESS_S = 0.002


@dataclass(slots=True)
class _Rate:
    """Times of a server's last answers, their medians, and the usual time in its queue."""

    per_work: tuple[float, ...]
    seconds: tuple[float, ...]
    usual_per_work: float
    usual_s: float
    queue_s: float
    at: float
    answers: int


_NO_RATE = _Rate((), (), 0.0, 0.0, 0.0, 0.0, 0)


class Speeds:
    """Measured seconds per unit of work (`Part.work`) of each expert server, over all calls of a client."""

    def __init__(self) -> None:
        self._rates: dict[str, _Rate] = {}
        self._fit = LoadFit()
        self._made: tuple[tuple[str, ...], float, Float, Float] = (
            (), 0.0, np.empty(0), np.empty(0),
        )  # fmt: skip
        # Servers that have been ejected as slow: fewer slow answers eject them again.
        self._on_trial: frozenset[str] = frozenset()

    @property
    def load_pairs(self) -> float:
        """Pairs of an expert that take as long as reading its weights, as fitted so far."""
        return self._fit.load_pairs

    def observe(
        self,
        server: str,
        work: float,
        service_s: float,
        now: float,
        *,
        pairs: float = 0.0,
        queue_s: float = 0.0,
    ) -> None:
        """Record a server's time for `work`, by its own clock; used by dispatch and ejection.

        Args:
            server: Its id.
            work: `Part.work`.
            service_s: Seconds from its first view of the request to its answer.
            now: Monotonic seconds.
            pairs: (token, expert) pairs in the work; 0: unknown.
            queue_s: Seconds of `service_s` in which it computed for other requests.
        """
        queue_s = min(queue_s, service_s)
        seconds = max(service_s - queue_s, _LEAST_S)
        queue_s = min(queue_s, _MOST_QUEUE_S)
        known = self._rates.get(server)
        if known is not None and known.answers >= _LEAST_KNOWN and pairs > 0:
            experts = work - pairs / self.load_pairs
            self._fit.observe(experts, pairs, seconds / known.usual_per_work)
        before = known or _NO_RATE
        per_work = (*before.per_work[1 - _WINDOW :], seconds / work)
        recent = (*before.seconds[1 - _WINDOW :], seconds)
        # A mean of all answers, until there are enough.
        weight = max(_QUEUE_WEIGHT, 1 / (before.answers + 1))
        queue = before.queue_s + weight * (queue_s - before.queue_s)
        rate = _Rate(
            per_work, recent, _median(per_work), _median(recent), queue, now, before.answers + 1
        )
        # Other threads may read, so a new name makes a new dict. Losing a concurrent update does no harm.
        if known is None:
            self._rates = {**self._rates, server: rate}
        else:
            self._rates[server] = rate

    def forget(self, server: str) -> None:
        """Drop the times of a server ejected as slow. New answers alone decide about it; fewer are enough."""
        self._on_trial |= {server}
        self._rates = {name: rate for name, rate in self._rates.items() if name != server}

    def load(self, servers: Sequence[str], in_flight_work: Sequence[float], now: float) -> Load:
        """Return the servers' measured rates and backlogs, for the dispatch policy.

        Args:
            servers: Servers of the placement, in its order.
            in_flight_work: This client's work in flight on each server.
            now: Monotonic seconds.
        """
        rate_S, queue_S = self._rates_and_queues(tuple(servers), now)
        if not any(in_flight_work):
            return Load(rate_S, queue_S, self.load_pairs)
        # Its own requests are among those that wait there.
        own_S = rate_S * np.asarray(in_flight_work, dtype=np.float64)
        return Load(rate_S, np.maximum(own_S, queue_S), self.load_pairs)

    def _rates_and_queues(self, servers: tuple[str, ...], now: float) -> tuple[Float, Float]:
        """Return seconds per unit of work, and until the server begins; old ones fade to the usual, and to 0.

        Recomputed every `_REFRESH_S`.
        """
        made_for, made_at, rate_S, queue_S = self._made
        if made_for == servers and 0 <= now - made_at < _REFRESH_S:
            return rate_S, queue_S
        usual = self.usual(servers)
        rate_S, queue_S = np.empty(len(servers)), np.zeros(len(servers))
        for s, server in enumerate(servers):
            known = self._rates.get(server)
            if known is None or known.answers < _LEAST_KNOWN:
                rate_S[s] = usual
                continue
            trust = 0.5 ** (max(now - known.at, 0.0) / _HALF_LIFE_S)
            rate_S[s] = usual + trust * (known.usual_per_work - usual)
            queue_S[s] = trust * known.queue_s
        self._made = servers, now, rate_S, queue_S
        return rate_S, queue_S

    def usual(self, servers: Sequence[str]) -> float:
        """Return the median seconds per unit of work, assumed for unmeasured servers; 1 if none is known."""
        rates = self._rates
        known = [rates[s].usual_per_work for s in servers if s in rates]
        return _median(known) if known else 1.0

    def is_outlier(self, server: str, servers: Sequence[str]) -> bool:
        """Whether to eject a server as slow: it takes over `_SLOW_FACTOR` times these servers' usual time.

        This must hold both per unit of work and per answer: each answer has a fixed cost, so a server with
        little work takes long per unit. The excess must also be long enough to matter to a layer call.
        """
        rates = self._rates
        known = rates.get(server)
        enough = _TRIAL_ANSWERS if server in self._on_trial else _SLOW_ANSWERS
        if known is None or known.answers < enough or known.usual_s <= _LEAST_EXCESS_S:
            return False
        usual_s = _median([rates[s].usual_s for s in servers if s in rates] or [known.usual_s])
        return (
            known.usual_per_work > _SLOW_FACTOR * self.usual(servers)
            and known.usual_s > _SLOW_FACTOR * usual_s
            and known.usual_s - usual_s > _LEAST_EXCESS_S
        )


def _median(values: Sequence[float]) -> float:
    """Median; the lower of the two middle values."""
    return sorted(values)[(len(values) - 1) // 2]


@dataclass
class _Record:
    failures: int = 0
    ejections: int = 0
    until: float = -math.inf


class Ejections:
    """Temporary ejection of servers that fail or are far too slow; they are asked only as a last resort.

    Pure state machine (no I/O, no clock), thread-safe. At most a third of the servers (one of two) are
    ejected at a time, so that a fault of the client itself does not empty the pool. Each ejection is twice as
    long as the one before, unless a minute has passed in between.
    """

    FAILURES = 3
    """Consecutive failed requests that eject a server."""
    _FIRST_S, _LONGEST_S = 5.0, 60.0

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}
        # End of the ejection that ends last.
        self._latest = -math.inf
        self._lock = threading.Lock()

    def failed(self, server: str, servers: Sequence[str], now: float) -> bool:
        """Count a failed or beaten request; `FAILURES` in a row may eject. Returns whether this one does."""
        with self._lock:
            record = self._records.setdefault(server, _Record())
            record.failures += 1
            return record.failures >= self.FAILURES and self._eject(server, servers, now)

    def answered(self, server: str) -> None:
        """Reset the server's count of consecutive failures, as it answered. A running ejection goes on."""
        record = self._records.get(server)
        if record is not None:
            record.failures = 0

    def slow(self, server: str, servers: Sequence[str], now: float) -> bool:
        """Eject a speed outlier for a while, unless too many are ejected. Returns whether it was ejected."""
        with self._lock:
            self._records.setdefault(server, _Record())
            return self._eject(server, servers, now)

    def any_out(self, clock: Callable[[], float]) -> bool:
        """Whether any server may be ejected now; reads the clock only if one was not long ago."""
        if self._latest == -math.inf:
            return False
        if clock() < self._latest:
            return True
        self._latest = -math.inf
        return False

    def out(self, server: str, now: float) -> bool:
        """Whether a server is ejected now: layer calls ask it only for pairs that the others cannot take."""
        record = self._records.get(server)
        return record is not None and now < record.until

    def _eject(self, server: str, servers: Sequence[str], now: float) -> bool:
        # The lock is held.
        record = self._records[server]
        already = sum(self.out(other, now) for other in servers)
        if now < record.until or already >= self._cap(len(servers)):
            return False
        times = 0 if now - record.until > self._LONGEST_S else record.ejections
        record.until = now + min(self._FIRST_S * 2.0**times, self._LONGEST_S)
        self._latest = max(self._latest, record.until)
        record.ejections = times + 1
        record.failures = 0
        return True

    @staticmethod
    def _cap(servers: int) -> int:
        return 0 if servers < 2 else max(1, servers // 3)
