"""The autoscaler's decisions, without I/O and clock, for `eaas autoscale` and the simulator.

The utilisation, the part of the time for which servers are busy, is kept near its target. `work` is the sum
of the servers' utilisations: 4 servers that are busy 75 % of the time do the work of 3. Work does not depend
on the number of servers, so n servers would be busy work / n. With target t and tolerance d (a part of t)

        too few              right, nothing changes               too many
    ------------------|--------------------|----------------------|---------------> servers
         work / (t * (1 + d))          work / t           work / (t * (1 - d))

Beyond an edge, servers are added or removed one at a time until their number is work / t (rounded up). While
work varies by no more than d of itself, the number therefore never changes in both directions.

Latency can only add servers: it adds one while the latency target is missed and the servers are busy, and
blocks removal while latency is close to the target. Servers busy for less than half of the utilisation target
do not cause latency. The work at which a number of servers missed the latency target is kept for an hour;
otherwise an idle server would be removed, added back at once, and removed again.

Unknown values count against a change, as in Kubernetes' Horizontal Pod Autoscaler: an unmeasured server
counts as idle for scaling out, and as always busy for scaling in. Scaling in uses the highest work seen in
the scale-in window.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from eaas.config import AutoscalerConfig
from eaas.counted import counted

__all__ = ["Autoscaler", "Decision", "Reading"]

TOLERANCE = 0.15
"""Relative deviation of utilisation from its target that causes no change."""

# Longest wait for a change to complete: servers may take this long to load (balancer.apply_timeout_s).
_PATIENCE_S = 300.0
_REMEMBER_S = 3600.0
# If the busiest server's utilisation is below this part of the target, the servers do not cause the latency.
_BUSY_ENOUGH = 0.5
# Rounding of sums of floats.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Reading:
    """What `LiveAutoscaler` or the simulator measured since the previous reading.

    Attributes:
        now: Monotonic seconds.
        servers: Number of live expert servers that are not leaving.
        work: Sum of the utilisations (0 to 1) of the measured servers.
        unmeasured: Number of servers without a measurement.
        busiest: Highest utilisation of a server.
        fewest: Fewest servers that hold every expert with the wanted redundancy.
        token_s: Mean seconds between two tokens of a request; None: no tokens.
        changing: Description of servers that are joining or leaving, for people; empty: none.
    """

    now: float
    servers: int
    work: float
    unmeasured: int = 0
    busiest: float = 0.0
    fewest: int = 1
    token_s: float | None = None
    changing: str = ""


@dataclass(frozen=True)
class Decision:
    """The number of servers to ask the balancer for next; unchanged: nothing is asked.

    Attributes:
        before: The current number of servers.
        servers: That number, one more, or one fewer.
        goal: The right number; `servers` is a step towards it.
        reason: Why, for people.
    """

    before: int
    servers: int
    goal: int
    reason: str

    def __str__(self) -> str:
        step = (
            f"{self.before} -> {self.servers}" if self.servers != self.before else f"{self.before}"
        )
        return f"servers: {step}: {self.reason}"


class Autoscaler:
    """Decides, after each reading, the number of servers to ask for (see the module's docstring).

    Args:
        config: Target, limits and times.

    Raises:
        ValueError: min_servers is above max_servers.
    """

    def __init__(self, config: AutoscalerConfig) -> None:
        if config.min_servers > config.max_servers:
            raise ValueError(
                f"min_servers {config.min_servers} is above max_servers {config.max_servers}"
            )
        self._config = config
        # (time, upper bound of the work), over the scale-in window.
        self._work: deque[tuple[float, float]] = deque()
        self._watched_from: float | None = None
        # Direction towards `work / t`: +1, -1, or 0 for no change.
        self._heading = 0
        self._changed_at = -math.inf
        self._requested: int | None = None
        self._changing_from: float | None = None
        # Number of servers that missed the latency target -> (time, least work at which it did).
        self._late: dict[int, tuple[float, float]] = {}

    def decide(self, reading: Reading) -> Decision:
        """Decide the next number of servers; the caller reports with `changed` if it carries it out."""
        goal, why = self._goal(reading)
        step = (goal > reading.servers) - (goal < reading.servers)
        wait = self._why_wait(reading, step) if step else ""
        if wait:
            why, step = f"{why}; {wait}", 0
        return Decision(reading.servers, reading.servers + step, goal, f"{_state(reading)}; {why}")

    def changed(self, decision: Decision, now: float) -> None:
        """Record that a decision is being carried out: the cooldown begins, and other changes wait."""
        self._changed_at, self._requested = now, decision.servers
        self._changing_from = now

    # -- how many ---------------------------------------------------------------------------------------

    def _goal(self, reading: Reading) -> tuple[int, str]:
        """Return the number of servers that work and latency call for, within the limits, and why."""
        goal, why = self._by_work(reading)
        late_goal, late_why = self._by_latency(reading, goal)
        if late_why:
            goal, why = late_goal, late_why
        fewest = max(reading.fewest, self._config.min_servers)
        most = max(fewest, self._config.max_servers)
        if goal < fewest:
            what = "every expert's replicas need" if fewest == reading.fewest else "min_servers is"
            goal, why = fewest, f"{why}, but {what} {fewest}"
        elif goal > most:
            goal, why = most, f"{why}, but max_servers is {most}"
        return goal, why

    def _by_work(self, reading: Reading) -> tuple[int, str]:
        least, most = self._record(reading)
        servers, target = reading.servers, self._config.target_utilization
        high, low = (target * (1 + sign * TOLERANCE) for sign in (1, -1))
        enough, needed = _servers(least, target), _servers(most, target)
        if servers < _servers(least, high):
            self._heading = 1
        elif servers > _servers(most, low):
            self._heading = -1
        elif (self._heading > 0 and servers >= enough) or (self._heading < 0 and servers <= needed):
            self._heading = 0
        if self._heading > 0:
            return enough, f"to be busy {_percent(target)} takes {enough}"
        if self._heading < 0:
            peak = f"the most work of the last {self._config.scale_in_window_s:g} s"
            return (
                needed,
                f"{peak}, {most:.1f} servers', takes {needed} to be busy {_percent(target)}",
            )
        if reading.unmeasured == servers:
            return servers, "nothing to go by"
        return servers, f"as many as are right for {_percent(low)} to {_percent(high)}"

    def _record(self, reading: Reading) -> tuple[float, float]:
        """Add the reading's work to the scale-in window; return the lower and upper bound of the work."""
        most = reading.work + reading.unmeasured
        if self._watched_from is None:
            self._watched_from = reading.now
        self._work.append((reading.now, most))
        while self._work[0][0] < reading.now - self._config.scale_in_window_s:
            self._work.popleft()
        return reading.work, max(work for _, work in self._work)

    def _by_latency(self, reading: Reading, goal: int) -> tuple[int, str]:
        """Return the number of servers for the latency target, and why; an empty reason: `goal` is enough."""
        target_ms = self._config.latency_target_ms
        now, servers, work = reading.now, reading.servers, reading.work
        if not target_ms:
            return goal, ""
        self._late = {n: seen for n, seen in self._late.items() if now - seen[0] < _REMEMBER_S}
        token_ms = 1000 * (reading.token_s or 0.0)
        idle = reading.busiest < _BUSY_ENOUGH * self._config.target_utilization
        if token_ms > target_ms and not idle:
            least = min(work, self._late.get(servers, (now, work))[1])
            self._late[servers] = (now, least)
            why = f"a token takes longer than {target_ms:g} ms"
            return (servers + 1, why) if goal <= servers else (goal, "")
        if token_ms > target_ms and goal == servers:
            why = f"a token takes longer than {target_ms:g} ms, but these are mostly idle"
            return goal, f"{why}: more would not help"
        if goal >= servers:
            return goal, ""
        near_ms = target_ms * (1 - TOLERANCE)
        if token_ms > near_ms and not idle:
            return servers, f"no fewer while a token takes longer than {near_ms:.3g} ms"
        return self._not_late(servers, goal)

    def _not_late(self, servers: int, goal: int) -> tuple[int, str]:
        """Raise the goal above every number of servers that missed the latency target at this much work."""
        most = max(work for _, work in self._work)
        safe = most / (1 - TOLERANCE)
        refuted = [n for n, (_, work) in self._late.items() if work < safe and n >= goal]
        if not refuted:
            return goal, ""
        fewest, work = min(servers, max(refuted) + 1), self._late[max(refuted)][1]
        verb = "was" if max(refuted) == 1 else "were"
        return fewest, f"{counted(max(refuted), 'server')} {verb} late with the work of {work:.1f}"

    # -- when -------------------------------------------------------------------------------------------

    def _why_wait(self, reading: Reading, step: int) -> str:
        """Return why a step towards the goal has to wait for a later reading; empty: it is taken now."""
        now = reading.now
        under_way = self._under_way(reading)
        if under_way:
            return f"waits: {under_way}"
        since_s, cooldown_s = now - self._changed_at, self._config.cooldown_s
        if since_s < cooldown_s:
            return f"waits: last change {since_s:.0f} s ago, cooldown {cooldown_s:g} s"
        assert self._watched_from is not None
        watched_s = now - self._watched_from
        window_s = self._config.scale_in_window_s
        if step < 0 and watched_s < window_s and reading.servers <= self._config.max_servers:
            return f"waits: watched for {watched_s:.0f} s of {window_s:g} s"
        return ""

    def _under_way(self, reading: Reading) -> str:
        """Describe the unfinished change that the next one waits for; empty: none, or it took too long."""
        what = reading.changing
        if self._requested == reading.servers:
            self._requested = None
        if not what and self._requested is not None:
            verb = "was" if self._requested == 1 else "were"
            what = f"{counted(self._requested, 'server')} {verb} asked for"
        if not what:
            self._changing_from = None
            return ""
        if self._changing_from is None:
            self._changing_from = reading.now
        if reading.now - self._changing_from < _PATIENCE_S:
            return what
        self._requested = None
        return ""


def _servers(work: float, utilization: float) -> int:
    """Return the fewest servers that do this work at this utilisation or less; at least one."""
    return max(1, math.ceil(work / utilization - _ROUNDING))


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _state(reading: Reading) -> str:
    """Describe a reading in words, for a decision's reason."""
    measured = reading.servers - reading.unmeasured
    text = "no server was measured"
    if measured > 0:
        text = f"busy {_percent(reading.work / measured)}, the busiest {_percent(reading.busiest)}"
        if reading.unmeasured:
            text += f", {reading.unmeasured} not measured"
    if reading.token_s is not None:
        text += f", {1000 * reading.token_s:.3g} ms a token"
    return text
