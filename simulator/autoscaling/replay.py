"""Replays a traffic trace on simulated groups of expert servers: an autoscaled one, and fixed sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from balancer.autoscaler import Autoscaler, Reading
from eaas.config import AutoscalerConfig
from simulator.autoscaling.serving import Load, ServerModel, SharedServers
from simulator.autoscaling.traffic import Traffic

__all__ = ["Outcome", "run"]


@dataclass
class Outcome:
    """The result of replaying a traffic trace on one group of servers.

    Attributes:
        seconds: Length of the trace.
        servers: (time in seconds, number of servers from then on) of each change; includes servers that are
            starting or leaving.
        load: Load over the whole trace.
        waits: (seconds between two tokens, number of tokens) of each interval.
        unfinished: Requests not done at the end.
    """

    seconds: float
    servers: list[tuple[float, int]]
    load: Load = field(default_factory=Load)
    waits: list[tuple[float, float]] = field(default_factory=list)
    unfinished: int = 0

    @property
    def server_hours(self) -> float:
        """Sum over servers of the hours that each was present, starting and leaving included."""
        ends = [at for at, _ in self.servers[1:]] + [self.seconds]
        spans = zip(self.servers, ends, strict=True)
        return sum(count * (end - at) for (at, count), end in spans) / 3600

    @property
    def sizes(self) -> list[int]:
        """Numbers of servers over time, starting and leaving ones included."""
        return [count for _, count in self.servers]

    def token_s(self, share: float) -> float:
        """Return a quantile (`share`, 0 to 1) of the seconds between two tokens, from means of intervals."""
        waits = sorted(self.waits)
        reached, wanted = 0.0, share * sum(tokens for _, tokens in waits)
        for token_s, tokens in waits:
            reached += tokens
            if reached >= wanted:
                return token_s
        return 0.0


def run(
    traffic: Traffic,
    model: ServerModel,
    servers: int,
    config: AutoscalerConfig,
    *,
    autoscaled: bool,
    fewest: int = 1,
    change_s: float = 0.0,
    progress: Callable[[float], None] = lambda share: None,
) -> Outcome:
    """Replay a traffic trace on a simulated group of servers.

    Args:
        model: Model of servers and requests.
        servers: Number of servers at the start.
        config: Settings of the autoscaler; waits are averaged over its interval.
        autoscaled: Whether the live `Autoscaler` decides the group's size; otherwise it stays.
        fewest: Fewest servers that hold every expert with the wanted redundancy.
        change_s: Seconds until a new server computes, or until a leaving one (which still computes) has left.
        progress: Called after each interval with the part of the trace done.

    Raises:
        ValueError: min_servers is above max_servers.
    """
    autoscaler = Autoscaler(config) if autoscaled else None
    replay = _Replay(traffic, model, servers)
    while not replay.is_over:
        load = replay.run(config.interval_s)
        if autoscaler is not None:
            coming = replay.wanted - replay.serving.servers
            reading = Reading(
                now=replay.now,
                servers=replay.wanted,
                work=load.computed / (model.tokens_per_s * load.seconds),
                unmeasured=max(0, coming),
                busiest=load.utilization,
                fewest=fewest,
                token_s=load.token_s,
                changing="" if not coming else "one comes" if coming > 0 else "one goes",
            )
            decision = autoscaler.decide(reading)
            if decision.servers != decision.before:
                autoscaler.changed(decision, replay.now)
                replay.change(decision.servers, change_s)
        progress(replay.now / traffic.span_s)
    return replay.outcome


class _Replay:
    """State of a traffic replay: the group's servers and requests at a simulated time.

    Attributes:
        now: Seconds since the start of the trace.
        wanted: Wanted number of servers.
        serving: Servers that compute, and their requests.
    """

    def __init__(self, traffic: Traffic, model: ServerModel, servers: int) -> None:
        self.now = 0.0
        self.wanted = servers
        self.serving = SharedServers(model, servers)
        self.outcome = Outcome(traffic.span_s, [(0.0, servers)])
        self._arrivals = list(
            zip(
                traffic.arrival_s_R.tolist(),
                traffic.prompt_R.tolist(),
                traffic.output_R.tolist(),
                strict=True,
            )
        )
        self._arrivals.reverse()
        self._changed_at = math.inf

    @property
    def is_over(self) -> bool:
        """Whether the whole trace is replayed; the outcome is then complete."""
        return self.now >= self.outcome.seconds

    def change(self, servers: int, change_s: float) -> None:
        """Start a change to this number of servers, in force after `change_s`; new ones cost at once."""
        self.wanted = servers
        self._changed_at = self.now + change_s
        if servers > self.serving.servers:
            self.outcome.servers.append((self.now, servers))

    def run(self, seconds: float) -> Load:
        """Advance by this time, or to the end of the trace; return the load in it, for the next decision."""
        until = min(self.now + seconds, self.outcome.seconds)
        while self.now < until:
            while self._arrivals and self._arrivals[-1][0] <= self.now:
                _, prompt, output = self._arrivals.pop()
                self.serving.arrive(prompt, output)
            arrival_at = self._arrivals[-1][0] if self._arrivals else math.inf
            to = min(until, arrival_at, self._changed_at)
            step_s = min(to - self.now, self.serving.next_s())
            self.serving.advance(step_s)
            # At an event, take its exact time, because a sum of floats would drift.
            self.now = to if step_s == to - self.now else self.now + step_s
            if self.now >= self._changed_at:
                self._settle()
        load = self.serving.take_load()
        self.outcome.load.add(load)
        self.outcome.waits.append((load.token_s or 0.0, load.outputs))
        self.outcome.unfinished = self.serving.requests + len(self._arrivals)
        return load

    def _settle(self) -> None:
        """Complete the change that is due: new servers compute from now on, leaving ones no more."""
        if self.wanted < self.serving.servers:
            self.outcome.servers.append((self.now, self.wanted))
        self.serving.servers = self.wanted
        self._changed_at = math.inf
