"""How fast servers are, compared with one another: what dispatch levels by, and who is left out.

Servers state with each answer how long they had the request, so neither the way nor a client that looked late
counts.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attention_client.dispatch import Load

__all__ = ["Ejections", "Speeds"]

# A server that is asked little is to get another chance: what is known of it halves in weight in this time.
_HALF_LIFE_S = 10.0
# The median of so many answers: the first ones of a server, and some later, take far longer than is usual.
_WINDOW = 7
_LEAST_KNOWN = 3


# How often rates are looked at anew.
_LOOK_S = 0.005
# A server that costs a call less than this is not slow, however many times slower than the others it is.
_LEAST_EXCESS_S = 0.002


@dataclass(slots=True)
class _Rate:
    """What the last answers of a server took, and their medians."""

    per_work: tuple[float, ...]
    seconds: tuple[float, ...]
    usual_per_work: float
    usual_s: float
    at: float
    answers: int


_NO_RATE = _Rate((), (), 0.0, 0.0, 0.0, 0)


class Speeds:
    """Learned seconds per unit of work (`dispatch.parts.Chunks`), by server."""

    def __init__(self) -> None:
        self._rates: dict[str, _Rate] = {}
        self._made: tuple[tuple[str, ...], float, npt.NDArray[np.float64]] = ((), 0.0, np.empty(0))

    def observe(self, server: str, work: float, seconds: float, now: float) -> None:
        """Learn from one answer."""
        known = self._rates.get(server)
        before = known or _NO_RATE
        per_work = (*before.per_work[1 - _WINDOW :], seconds / work)
        recent = (*before.seconds[1 - _WINDOW :], seconds)
        rate = _Rate(per_work, recent, _median(per_work), _median(recent), now, before.answers + 1)
        # Other threads may be reading, so that a new name makes a new table; an observation lost to
        # another one is no harm.
        if known is None:
            self._rates = {**self._rates, server: rate}
        else:
            self._rates[server] = rate

    def forget(self, server: str) -> None:
        """Begin anew with a server."""
        self._rates = {name: rate for name, rate in self._rates.items() if name != server}

    def load(self, servers: Sequence[str], in_flight_work: Sequence[float], now: float) -> Load:
        """What dispatch is to know.

        Args:
            servers: Of the placement, in its order.
            in_flight_work: What this client waits for, by server.
            now: Monotonic seconds.
        """
        rate_S = self._rate_S(tuple(servers), now)
        if not any(in_flight_work):
            return Load(rate_S, np.zeros(len(servers)))
        return Load(rate_S, rate_S * np.asarray(in_flight_work, dtype=np.float64))

    def _rate_S(self, servers: tuple[str, ...], now: float) -> npt.NDArray[np.float64]:
        """Seconds per work of each server, made anew each `_LOOK_S`: they do not change from call to call."""
        made_for, made_at, rate_S = self._made
        if made_for == servers and 0 <= now - made_at < _LOOK_S:
            return rate_S
        usual = self.usual(servers)
        rate_S = np.empty(len(servers))
        for s, server in enumerate(servers):
            known = self._rates.get(server)
            if known is None or known.answers < _LEAST_KNOWN:
                rate_S[s] = usual
                continue
            trust = 0.5 ** (max(now - known.at, 0.0) / _HALF_LIFE_S)
            rate_S[s] = usual + trust * (known.usual_per_work - usual)
        self._made = servers, now, rate_S
        return rate_S

    def usual(self, servers: Sequence[str]) -> float:
        """The median seconds per work of those of these servers that are known; 1 where none is."""
        rates = self._rates
        known = [rates[s].usual_per_work for s in servers if s in rates]
        return _median(known) if known else 1.0

    def is_outlier(
        self, server: str, servers: Sequence[str], factor: float, least_answers: int
    ) -> bool:
        """Whether a server takes more than `factor` times what is usual among these.

        Of a unit of work and of a whole answer: who gets little work takes long for a unit of it, since an
        answer has a cost of its own. And by so much that a layer call feels it.
        """
        rates = self._rates
        known = rates.get(server)
        if known is None or known.answers < least_answers or known.usual_s <= _LEAST_EXCESS_S:
            return False
        usual_s = _median([rates[s].usual_s for s in servers if s in rates] or [known.usual_s])
        return (
            known.usual_per_work > factor * self.usual(servers)
            and known.usual_s > factor * usual_s
            and known.usual_s - usual_s > _LEAST_EXCESS_S
        )


def _median(values: Sequence[float]) -> float:
    """The lower one of two in the middle."""
    return sorted(values)[(len(values) - 1) // 2]


@dataclass
class _Record:
    failures: int = 0
    ejections: int = 0
    until: float = -math.inf


class Ejections:
    """Servers that are asked only where nobody else can be, for a while: they fail, or are far too slow.

    Pure: events and a monotonic time in. A cap keeps a fault of the client's own from emptying the pool: no
    more than a third of the servers (but one of two) are out at a time.

    After a time out a server is asked again as if nothing had been. The next time it is out for twice as
    long, unless a minute has passed. For any number of threads.
    """

    FAILURES = 3
    """Failed requests in a row that eject a server."""
    SLOW_FACTOR = 5.0
    """Times the usual seconds per work that eject a server."""
    SLOW_ANSWERS = 5
    """Answers that a server has given before it can be called slow."""
    _FIRST_S, _LONGEST_S = 5.0, 60.0

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}
        self._lock = threading.Lock()

    def failed(self, server: str, servers: Sequence[str], now: float) -> bool:
        """A request timed out, was refused or came back damaged. Says whether that ejected the server."""
        with self._lock:
            record = self._records.setdefault(server, _Record())
            record.failures += 1
            return record.failures >= self.FAILURES and self._eject(server, servers, now)

    def answered(self, server: str) -> None:
        """A request was answered in time."""
        record = self._records.get(server)
        if record is not None:
            record.failures = 0

    def slow(self, server: str, servers: Sequence[str], now: float) -> bool:
        """The server is an outlier in speed. Says whether that ejected it."""
        with self._lock:
            self._records.setdefault(server, _Record())
            return self._eject(server, servers, now)

    def out(self, server: str, now: float) -> bool:
        """Whether a server is ejected now."""
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
        record.ejections = times + 1
        record.failures = 0
        return True

    @staticmethod
    def _cap(servers: int) -> int:
        return 0 if servers < 2 else max(1, servers // 3)
