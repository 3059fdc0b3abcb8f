"""In the monitor: judges whether an expert server's work progresses while its heartbeats continue. Pure.

A process can answer the monitor while the loop that does its work is stuck. Two signs show that:

  stalled_s: an expert server watches its own loop, measures how long batches take, and reports in heartbeats
    how long an overdue batch has not moved.
  the progress counter: requests are in flight in each heartbeat, and the counter stands still for five leases
    and for twice the longest standstill that this incarnation recovered from. This sign serves members that
    report no `stalled_s`. It ignores how long batches take, so it is slow.
"""

from __future__ import annotations

__all__ = ["Progress"]

_PATIENCE_LEASES = 5.0
_MARGIN = 2.0


class Progress:
    """Tracks the progress of one incarnation of a member; only an expert server's is judged.

    Args:
        lease_s: Lease in seconds; the patience is a multiple of it.

    Attributes:
        count: Work done so far, as last reported.
        in_flight: Requests in progress.
        stuck: Why the member counts as stuck, as text; None if it does not.
    """

    __slots__ = ("_still_since", "count", "in_flight", "patience_s", "stuck")

    def __init__(self, lease_s: float, count: int = 0, in_flight: int = 0) -> None:
        self.patience_s = _PATIENCE_LEASES * lease_s
        self.count = count
        self.in_flight = in_flight
        self.stuck: str | None = None
        # Time of the first heartbeat of a standstill with requests in flight.
        self._still_since: float | None = None

    def reported(self, count: int, in_flight: int, stalled_s: float, now: float) -> None:
        """Record the progress in an expert server's heartbeat, and update `stuck`, which makes it SUSPECT."""
        moved = count != self.count
        self.count, self.in_flight = count, in_flight
        if moved or not in_flight:
            if moved and self._still_since is not None:
                self.patience_s = max(self.patience_s, _MARGIN * (now - self._still_since))
            self._still_since = None
        if in_flight and self._still_since is None:
            self._still_since = now
        still_s = 0.0 if self._still_since is None else now - self._still_since
        self.stuck = None
        if stalled_s > 0 or still_s >= self.patience_s:
            self.stuck = _describe(max(stalled_s, still_s), in_flight)


def _describe(seconds: float, in_flight: int) -> str:
    requests = "request" if in_flight == 1 else "requests"
    return f"no progress for {seconds:.1f} s with {in_flight} {requests} in flight"
