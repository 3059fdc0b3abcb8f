"""The monitor's failure detector: leases, phi-accrual suspicion, self-isolation check. No I/O, no clock.

It judges a member's silence (the time since its last heartbeat) in three ways:

  lapsed: the silence exceeds a lease. Only a lapsed lease makes a member DEAD.
  late: phi is at least PHI (phi-accrual, Hayashibara et al. 2004). With mean m and deviation s of the last
    WINDOW intervals between this member's heartbeats, and its silence t,

        phi(t) = -log10(1 - F((t - m) / s)),  F: the standard normal distribution.

    At phi = 8, a healthy member's heartbeat is this late once in 10^8 intervals. Solved for t, this is
    one number per member, `patience_s` = m + 5.61 s, updated with each heartbeat.
  held: when the first lease ends, most members have been silent unusually long (`unusual_s`), or were within
    the last lease. Then this monitor is probably cut off, so it declares no member dead for one more lease.
    There is no second hold until most members were heard for a lease. A death is therefore noticed at most
    two leases after the last heartbeat, even if all members die at once.

    A silence is unusual above m + 4 s and above a lease less (m + 4 s). A member may already have been silent
    for one interval when a cut begins; when its lease ends, the cut has lasted only the rest of the lease.

A gap between two ticks means that this process was paused: every lease starts anew.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import NamedTuple

__all__ = ["PHI", "WINDOW", "Arrivals", "Detector", "Silence"]

PHI = 8.0
"""Suspicion at which a member is late; a healthy member reaches it once in 10^PHI intervals."""
WINDOW = 64
"""Number of heartbeat intervals in a member's estimate."""

_DEVIATIONS = -NormalDist().inv_cdf(10.0**-PHI)
_UNUSUAL_DEVIATIONS = 4.0
# Minimum number of intervals to estimate the deviation.
_MIN_INTERVALS = 16
# Shares of a lease: patience before there are enough intervals, and the least deviation assumed. Even a
# member that was punctual for a minute may be delayed once by its scheduler.
_FIRST_PATIENCE_SHARE = 0.75
_LEAST_DEVIATION_SHARE = 0.05
# Members needed to judge the monitor's own network.
_MIN_MEMBERS = 3


@dataclass(slots=True, eq=False)
class Arrivals:
    """Heartbeat arrivals of one incarnation of a member.

    Attributes:
        heard_at: Monotonic seconds of the last heartbeat.
        patience_s: Silence after which the member is late.
        unusual_s: Silence after which the member counts for the self-isolation check.
        remote: Its heartbeats come over the network (the monitor's own do not).
        late: The member was found late, and no heartbeat has arrived since.
    """

    heard_at: float
    patience_s: float
    unusual_s: float
    remote: bool
    late: bool = False
    # The last intervals and their sums, in integer microseconds because integers do not drift.
    _intervals: array[int] = field(default_factory=lambda: array("q"))
    _sum: int = 0
    _squares: int = 0

    def add(self, interval_us: int) -> tuple[float, float] | None:
        """Record an interval between heartbeats. Returns mean and deviation in seconds; None if too few."""
        if len(self._intervals) == WINDOW:
            oldest = self._intervals.pop(0)
            self._sum -= oldest
            self._squares -= oldest * oldest
        self._intervals.append(interval_us)
        self._sum += interval_us
        self._squares += interval_us * interval_us
        count = len(self._intervals)
        if count < _MIN_INTERVALS:
            return None
        deviation = math.sqrt(count * self._squares - self._sum * self._sum) / count
        return self._sum / count * 1e-6, deviation * 1e-6


class Silence(NamedTuple):
    """Findings of a tick, for the registry: members that became late, and members whose lease has ended.

    Attributes:
        late: Members that became late with this tick, including those whose lease has ended.
        lapsed: Members whose lease has ended; the owner forgets them.
    """

    late: tuple[str, ...] = ()
    lapsed: tuple[str, ...] = ()


class Detector:
    """Judges the silence of all members: O(1) per heartbeat, O(silent members) per tick.

    Args:
        lease_s: Seconds of silence that end an incarnation.
        heartbeat_s: The members' heartbeat interval.
        now: Monotonic seconds. It never falls from call to call.
        grace_s: Extra time for members watched from the start, which first have to find a restarted monitor.

    Attributes:
        hold_reason: Why the last tick declared no member dead, as text; None if leases end normally.
    """

    def __init__(
        self, lease_s: float, heartbeat_s: float, now: float, grace_s: float = 0.0
    ) -> None:
        self._lease_s = lease_s
        self._heartbeat_us = round(heartbeat_s * 1e6)
        self._first_patience_s = _FIRST_PATIENCE_SHARE * lease_s
        self._least_deviation_s = _LEAST_DEVIATION_SHARE * lease_s
        # A member heard more recently than this is not judged.
        self._least_silence_s = min(
            self._first_patience_s,
            heartbeat_s + _DEVIATIONS * self._least_deviation_s,
            lease_s / 2,
        )
        # Members in order of silence, the longest first, so that a tick stops early.
        self._arrivals: OrderedDict[str, Arrivals] = OrderedDict()
        self._remote_count = 0
        self._ticked_at = now
        # A member not heard since the interruption has a lease from then on.
        self._interrupted_at = now
        self._leases_from = now + grace_s
        # When each remote member was heard again after an unusual silence. Last lease only, oldest first.
        self._returned: OrderedDict[str, float] = OrderedDict()
        self._held_from: float | None = None
        self.hold_reason: str | None = None

    def watch(self, member_id: str, now: float, *, remote: bool = True) -> Arrivals:
        """Watch an incarnation as if a heartbeat came now, in place of any other incarnation of this id."""
        self.forget(member_id)
        arrivals = Arrivals(now, self._first_patience_s, self._lease_s, remote)
        self._arrivals[member_id] = arrivals
        self._remote_count += remote
        return arrivals

    def forget(self, member_id: str) -> None:
        """Stop watching a member: its incarnation has ended, or a new one begins. Ignores unknown ids."""
        gone = self._arrivals.pop(member_id, None)
        if gone is not None:
            self._remote_count -= gone.remote
            self._returned.pop(member_id, None)

    def heard(self, member_id: str, now: float) -> None:
        """Record a watched member's heartbeat: renews its lease, and adapts how late the next one may be."""
        arrivals = self._arrivals[member_id]
        if arrivals.remote and self._unusual(arrivals, now):
            self._returned[member_id] = now
            self._returned.move_to_end(member_id)
        interval_s = now - arrivals.heard_at
        # A longer interval was a pause of this process or a cut, not the member's jitter.
        if interval_s <= self._lease_s:
            # An early heartbeat (its state changed) does not make the next one due sooner.
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
        """Find members that are late (the registry makes them SUSPECT) or whose lease ended (DEAD).

        Call it at least every lease/8, and when a lease ends (`due_at`).
        """
        paused_s, self._ticked_at = self.paused_s(now), now
        if paused_s:
            self._interrupted_at, self._held_from = now, None
            self._leases_from = max(self._leases_from, now)
            self.hold_reason = (
                f"this monitor was paused for {paused_s:.1f} s: every lease starts anew"
            )
            return Silence()
        late, lapsed, silent_together = [], [], self._lately_returned(now)
        lapsed_at = math.inf
        for member_id, arrivals in self._arrivals.items():
            if now - arrivals.heard_at < self._least_silence_s:
                break
            silence_s = now - self._lease_from(arrivals)
            if self._unusual(arrivals, now) and member_id not in self._returned:
                silent_together += arrivals.remote
            if silence_s >= self._lease_s:
                lapsed.append(member_id)
                lapsed_at = min(lapsed_at, now - silence_s + self._lease_s)
            if silence_s >= min(arrivals.patience_s, self._lease_s) and not arrivals.late:
                arrivals.late = True
                late.append(member_id)
        most = self._remote_count >= _MIN_MEMBERS and 2 * silent_together > self._remote_count
        if self._must_hold(lapsed_at, most, now):
            return Silence(late=tuple(late))
        return Silence(tuple(late), tuple(lapsed))

    def _unusual(self, arrivals: Arrivals, now: float) -> bool:
        return now - self._lease_from(arrivals) >= min(arrivals.unusual_s, self._lease_s)

    def _lately_returned(self, now: float) -> int:
        """Count the members heard again within the last lease, after an unusual silence.

        They count as silent, because after a cut members are not all heard at once. A delayed answer
        postpones its member's next heartbeat by an interval.
        """
        while self._returned and now - next(iter(self._returned.values())) >= self._lease_s:
            self._returned.popitem(last=False)
        return len(self._returned)

    def _must_hold(self, lapsed_at: float, silent_together: bool, now: float) -> bool:
        """Decide whether this monitor is cut off and must hold the ended leases, the first at `lapsed_at`.

        `silent_together`: most members fell silent at the same time.
        """
        self.hold_reason = None
        if not silent_together:
            self._held_from = None
            return False
        if self._held_from is None:
            if lapsed_at > now:
                return False
            self._held_from = lapsed_at
        if now - self._held_from >= self._lease_s:
            # The hold ends. `_held_from` stays set, so that no new hold begins before most are heard again.
            return False
        self.hold_reason = (
            "most members fell silent together, so this monitor may be cut off: "
            f"no member is declared dead for {self._lease_s:g} s"
        )
        return True

    def paused_s(self, now: float) -> float:
        """Seconds for which the monitor was paused since the last tick, else 0; a pause renews all leases."""
        gap_s = now - self._ticked_at
        return gap_s if gap_s > self._lease_s / 2 else 0.0

    def due_at(self) -> float:
        """Time at which the next lease ends without a heartbeat (the next `tick`); inf without members."""
        for arrivals in self._arrivals.values():
            due_at = self._lease_from(arrivals) + self._lease_s
            if self.hold_reason is not None and self._held_from is not None:
                due_at = max(due_at, self._held_from + self._lease_s)
            return due_at
        return math.inf

    def _lease_from(self, arrivals: Arrivals) -> float:
        heard_at = arrivals.heard_at
        return self._leases_from if heard_at <= self._interrupted_at else heard_at
