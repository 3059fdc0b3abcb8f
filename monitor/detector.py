"""Whose silence means something: leases, suspicion, and doubt of oneself. No I/O, no clock.

Three judgements, each about the time since a member was last heard:

  lapsed: a lease of silence. Only that makes a member DEAD.
  late: phi is PHI at least (phi-accrual, Hayashibara et al. 2004). With mean m and deviation s of the last
    WINDOW intervals between this member's heartbeats, and t its silence,

        phi(t) = -log10(1 - F((t - m) / s)),  F: the standard normal distribution,

    so that phi = 8 means: a heartbeat this late, from a member that is well, once in 10^8 intervals. Solved
    for t that is one number a member, `patience_s` = m + 5.61 s, made anew with each heartbeat.
  doubted: when the first lapses, most members are silent for unusually long (`unusual_s`), or were so within
    the lease before. It is likelier then that this monitor is cut off, or was, than that they died: for one
    more lease nobody is declared dead. One doubt lasts one lease at most, and there is no other until most
    members were heard for a lease, so a death is seen at most two leases after the last heartbeat, even
    where all die at once.

    Unusual is more than m + 4 s, and no less than a lease less that: a cut that ends the lease of somebody
    who was silent for an interval when it began has held up all others for as long as this.

A gap between two ticks means that this process itself was paused: every lease starts anew.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from statistics import NormalDist

__all__ = ["PHI", "WINDOW", "Arrivals", "Detector", "Silence"]

PHI = 8.0
"""Suspicion at which a member is late; the chance that it is well then is 10^-PHI an interval."""
WINDOW = 64
"""Intervals that a member's estimate is made of."""

_DEVIATIONS = -NormalDist().inv_cdf(10.0**-PHI)
_UNUSUAL_DEVIATIONS = 4.0
# Fewer intervals say nothing of the deviation.
_ENOUGH = 16
# Of a lease: patience before there are enough of them, and the least deviation that is believed. A
# member that was punctual for a minute may still be kept waiting by its scheduler for once.
_FIRST_PATIENCE_SHARE = 0.75
_LEAST_DEVIATION_SHARE = 0.05
# Fewer members than this say nothing of the monitor's own network.
_LEAST_WITNESSES = 3


class Arrivals:
    """When one life's heartbeats came.

    Attributes:
        heard_at: Monotonic seconds of the last one.
        patience_s: Silence from which on it is late.
        unusual_s: Silence from which on it counts as silent together with others.
        late: It was found late, and has not been heard since.
        witness: Its silence says something of the monitor's own network (that of the monitor does not).
    """

    __slots__ = (
        "_intervals",
        "_next",
        "_squares",
        "_sum",
        "heard_at",
        "late",
        "patience_s",
        "unusual_s",
        "witness",
    )

    def __init__(self, now: float, patience_s: float, unusual_s: float, witness: bool) -> None:
        self.heard_at = now
        self.patience_s = patience_s
        self.unusual_s = unusual_s
        self.late = False
        self.witness = witness
        # A ring of microseconds with its sums: of integers, which do not drift.
        self._intervals = array("q")
        self._next = 0
        self._sum = 0
        self._squares = 0

    def add(self, interval_us: int) -> tuple[float, float] | None:
        """One more interval; mean and deviation in seconds once there are enough."""
        if len(self._intervals) < WINDOW:
            self._intervals.append(interval_us)
        else:
            oldest = self._intervals[self._next]
            self._sum -= oldest
            self._squares -= oldest * oldest
            self._intervals[self._next] = interval_us
            self._next = (self._next + 1) % WINDOW
        self._sum += interval_us
        self._squares += interval_us * interval_us
        count = len(self._intervals)
        if count < _ENOUGH:
            return None
        deviation = math.sqrt(count * self._squares - self._sum * self._sum) / count
        return self._sum / count * 1e-6, deviation * 1e-6


@dataclass(frozen=True)
class Silence:
    """What a tick found.

    Attributes:
        late: Members that are late since this tick, be it that their lease has ended, too.
        lapsed: Members whose lease has ended; the owner forgets them.
    """

    late: tuple[str, ...] = ()
    lapsed: tuple[str, ...] = ()


class Detector:
    """Judges the silence of any number of members: O(1) a heartbeat, O(silent members) a tick.

    Args:
        lease_s: Seconds of silence that end a life.
        heartbeat_s: What members were told to send a heartbeat at.
        now: Monotonic seconds. It never falls from call to call.
        grace_s: No lease of a member that is watched from the start begins before this is over: they have
            to find a restarted monitor first.

    Attributes:
        doubt: Why the last tick declared nobody dead, for people; None where it was sure.
    """

    def __init__(
        self, lease_s: float, heartbeat_s: float, now: float, grace_s: float = 0.0
    ) -> None:
        self._lease_s = lease_s
        self._heartbeat_us = round(heartbeat_s * 1e6)
        self._first_patience_s = _FIRST_PATIENCE_SHARE * lease_s
        self._least_deviation_s = _LEAST_DEVIATION_SHARE * lease_s
        # Nothing is to be said of whoever was heard more recently.
        self._least_silence_s = min(
            self._first_patience_s,
            heartbeat_s + _DEVIATIONS * self._least_deviation_s,
            lease_s / 2,
        )
        # The longest silent first: time passes only for the front.
        self._arrivals: OrderedDict[str, Arrivals] = OrderedDict()
        self._witnesses = 0
        self._ticked_at = now
        # Whoever was not heard since the interruption has a lease from then on.
        self._interrupted_at = now
        self._leases_from = now + grace_s
        # Witnesses that were heard again after an unusual silence, and when; of the last lease, oldest first.
        self._returned: OrderedDict[str, float] = OrderedDict()
        self._doubted_from: float | None = None
        self.doubt: str | None = None

    def watch(self, member_id: str, now: float, *, witness: bool = True) -> Arrivals:
        """A life begins, in place of any other of this id."""
        self.forget(member_id)
        arrivals = Arrivals(now, self._first_patience_s, self._lease_s, witness)
        self._arrivals[member_id] = arrivals
        self._witnesses += witness
        return arrivals

    def forget(self, member_id: str) -> None:
        """A life has ended. One that is not known is no error."""
        gone = self._arrivals.pop(member_id, None)
        if gone is not None:
            self._witnesses -= gone.witness
            self._returned.pop(member_id, None)

    def heard(self, member_id: str, now: float) -> None:
        """A heartbeat of a member that is watched."""
        arrivals = self._arrivals[member_id]
        if arrivals.witness and self._unusual(arrivals, now):
            self._returned[member_id] = now
            self._returned.move_to_end(member_id)
        interval_s = now - arrivals.heard_at
        # More than a lease was a pause of this process, or a cut: no jitter of the member's.
        if interval_s <= self._lease_s:
            # An early heartbeat (its state changed) does not make the next one due any sooner.
            estimate = arrivals.add(max(round(interval_s * 1e6), self._heartbeat_us))
            if estimate is not None:
                mean_s, deviation_s = estimate
                usual_s = mean_s + _UNUSUAL_DEVIATIONS * deviation_s
                arrivals.unusual_s = max(usual_s, self._lease_s - usual_s)
                deviation_s = max(deviation_s, self._least_deviation_s)
                arrivals.patience_s = mean_s + _DEVIATIONS * deviation_s
        arrivals.heard_at = now
        arrivals.late = False
        self._arrivals.move_to_end(member_id)

    def tick(self, now: float) -> Silence:
        """Time passes. Call it each lease/8 at the latest, and when a lease ends (`due_at`)."""
        paused_s, self._ticked_at = self.paused_s(now), now
        if paused_s:
            self._interrupted_at, self._doubted_from = now, None
            self._leases_from = max(self._leases_from, now)
            self.doubt = f"this monitor was paused for {paused_s:.1f} s: every lease starts anew"
            return Silence()
        late, lapsed, together = [], [], self._lately_returned(now)
        lapsed_at = math.inf
        for member_id, arrivals in self._arrivals.items():
            if now - arrivals.heard_at < self._least_silence_s:
                break
            silence_s = now - self._lease_from(arrivals)
            if self._unusual(arrivals, now) and member_id not in self._returned:
                together += arrivals.witness
            if silence_s >= self._lease_s:
                lapsed.append(member_id)
                lapsed_at = min(lapsed_at, now - silence_s + self._lease_s)
            if silence_s >= min(arrivals.patience_s, self._lease_s) and not arrivals.late:
                arrivals.late = True
                late.append(member_id)
        most = self._witnesses >= _LEAST_WITNESSES and 2 * together > self._witnesses
        if self._in_doubt(lapsed_at, most, now):
            return Silence(late=tuple(late))
        return Silence(tuple(late), tuple(lapsed))

    def _unusual(self, arrivals: Arrivals, now: float) -> bool:
        return now - self._lease_from(arrivals) >= min(arrivals.unusual_s, self._lease_s)

    def _lately_returned(self, now: float) -> int:
        """When a cut is over not all are heard at once: what it held up may have been an answer, and its
        member sends the next heartbeat an interval later. So one that was heard again counts for a lease.
        """
        while self._returned and now - next(iter(self._returned.values())) >= self._lease_s:
            self._returned.popitem(last=False)
        return len(self._returned)

    def _in_doubt(self, lapsed_at: float, together: bool, now: float) -> bool:
        """Whether leases that have ended, the first at `lapsed_at`, are to be held; `together`: most fell
        silent.
        """
        self.doubt = None
        if not together:
            self._doubted_from = None
            return False
        if self._doubted_from is None:
            if lapsed_at > now:
                return False
            self._doubted_from = lapsed_at
        if now - self._doubted_from >= self._lease_s:
            # Long enough. It stays set, so that there is no new doubt before most are heard again.
            return False
        self.doubt = (
            "most members fell silent together, as if this monitor were cut off: "
            f"nobody is declared dead for {self._lease_s:g} s"
        )
        return True

    def paused_s(self, now: float) -> float:
        """For how long this process itself was paused since the last tick; 0 where it was not."""
        gap_s = now - self._ticked_at
        return gap_s if gap_s > self._lease_s / 2 else 0.0

    def due_at(self) -> float:
        """When the next lease ends, if nobody is heard until then; inf where nobody is watched."""
        for arrivals in self._arrivals.values():
            due_at = self._lease_from(arrivals) + self._lease_s
            if self.doubt is not None and self._doubted_from is not None:
                due_at = max(due_at, self._doubted_from + self._lease_s)
            return due_at
        return math.inf

    def _lease_from(self, arrivals: Arrivals) -> float:
        heard_at = arrivals.heard_at
        return self._leases_from if heard_at <= self._interrupted_at else heard_at
