"""The network of a simulated cluster: delays, losses, duplicates, cuts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sim_process import RPC_S, Process, Refused


@dataclass(frozen=True)
class Weather:
    """Quality of the network while faults occur.

    Attributes:
        delay_s: Mean delay of a message.
        lost: Share of messages lost.
        twice: Share of messages duplicated.
    """

    delay_s: float = 0.001
    lost: float = 0.0
    twice: float = 0.0


class Network:
    """Delivery of messages; a part of `Simulation`."""

    def delay_s(self) -> float:
        """Delay of one message; some are overtaken by many others."""
        drawn = self.dice.random()
        return self.weather.delay_s * (0.05 + 2 * drawn if drawn < 0.95 else 20.0)

    def fate(self) -> str:
        """Fate of one message: once, twice or lost."""
        weather, drawn = self.weather, self.dice.random()
        if drawn < weather.lost:
            return "lost"
        return "twice" if drawn < weather.lost + weather.twice else "once"

    def is_cut(self, one: Process, other: Process) -> bool:
        """Whether the two processes are cut off from each other now."""
        if not self.cuts:
            return False
        return self.cuts.get(frozenset((one.host, other.host)), 0.0) > self.agenda.now

    def peer(self, name: str, pid: int | None = None) -> Process | None:
        """The process that answers at an address now."""
        found = [p for p in self.processes if p.id == name and p.alive and pid in (None, p.pid)]
        return found[-1] if found else None

    def call(
        self,
        sender: Process,
        name: str,
        take: Callable[[Any], Any],
        done: Callable[[Any], None],
        failed: Callable[[], None],
        pid: int | None = None,
    ) -> None:
        """A control call: executed never, once or twice; its sender gets one outcome."""
        over = [False]

        def end(action: Callable[[], None]) -> None:
            if not over[0]:
                over[0] = True
                action()

        sender.soon(RPC_S, lambda: end(failed))
        to = self.peer(name, pid)
        if to is None or self.is_cut(sender, to):
            return

        def broken() -> None:
            sender.soon(self.dice.uniform(0.01, 0.1), lambda: end(failed))

        def arrive() -> None:
            try:
                answer = take(to)
            except Refused:
                self._message(to, sender, lambda: end(failed), broken)
            else:
                self._message(to, sender, lambda: end(lambda: done(answer)), broken)

        self._message(sender, to, arrive, broken)

    def _message(
        self, sender: Process, to: Process, deliver: Callable[[], None], broken: Callable[[], None]
    ) -> None:
        """Send one part of a control call. A lost part arrives a little later, or the connection breaks."""
        fate, delays_s = self.fate(), [self.delay_s()]
        if fate == "lost":
            if self.dice.random() < 0.5:
                broken()
                return
            # Repeated by the transport. Two such parts and a heartbeat's interval are below a lease.
            delays_s = [self.dice.uniform(0.2, 0.4)]
        elif fate == "twice":
            delays_s.append(self.delay_s() + self.dice.uniform(0, 2.0))
        for delay_s in delays_s:
            to.soon(delay_s, lambda: None if self.is_cut(sender, to) else deliver())

    def stream(self, sender: Process, to: Process, deliver: Callable[[], None]) -> None:
        """Send on an ordered stream; a later message repeats a lost one."""
        if self.fate() == "lost" or self.is_cut(sender, to):
            return
        arrives_at = max(self.now + self.delay_s(), self._streams_until.get((sender, to), 0.0))
        self._streams_until[sender, to] = arrives_at + 1e-9
        to.soon(arrives_at - self.now, lambda: None if self.is_cut(sender, to) else deliver())
