"""What a launcher does while its cluster serves: it starts again what must not be missing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from eaas.errors import ClusterError, EaasError
from eaas.local.process import how_it_ended
from eaas.local.restart import Restarts

if TYPE_CHECKING:
    from eaas.local.cluster import LocalCluster
    from eaas.local.process import ChildProcess

__all__ = ["Supervisor"]

_MOST_FAILURES = 5


class Supervisor:
    """Watches a cluster that serves. For one thread.

    The attention client (the endpoint) and the fork server are started again when they end. Expert servers,
    monitor and balancer are not: serving goes on without them, and a person starts them with a printed line.
    """

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        # Processes whose end is told already.
        self._reported: set[int] = set()
        self._client = _Kept(
            lambda: cluster.children["attention-client"],
            lambda: cluster.start_again("attention-client"),
            "its running requests are lost",
            _MOST_FAILURES,
        )
        self._fork_server = _Kept(
            lambda: cluster.fork_server,
            cluster.start_fork_server,
            "the processes that it forked go on",
            None,
        )

    def step(self) -> list[str]:
        """Do what can be done without waiting; returns what people need to know.

        Raises:
            ClusterError: The attention client ends again and again.
        """
        lines = [
            f"{child.name} (pid {child.pid}) was started by hand; it ends with this cluster"
            for child in self._cluster.find_started_by_hand()
        ]
        lines += self._fork_server.step()
        if self.can_start:
            # Without a monitor it could not register.
            monitor = self._cluster.children["monitor"]
            lines += self._client.step("" if monitor.running else "the monitor")
        return lines + self._obituaries()

    @property
    def can_start(self) -> bool:
        """Whether a process can be started now without waiting for the fork server."""
        return self._fork_server.serves

    def _obituaries(self) -> list[str]:
        """What to say of processes that have ended and are not started again, once of each."""
        ended = [
            child
            for child in self._cluster.ended()
            if child.pid not in self._reported and child is not self._client.process
        ]
        self._reported.update(child.pid for child in ended)
        return [
            f"{child.name} (pid {child.pid}) has left"
            if child.process.returncode == 0
            else f"{child.name} (pid {child.pid}) ended; start it again with:\n"
            f"  {self._cluster.restart_line(child)}\n"
            for child in ended
        ]


class _Kept:
    """A process that is started again when it ends.

    Args:
        process: The present one.
        start: Starts the next one; does not wait for it.
        cost: What its end means, for people.
        most: Of `Restarts`.
    """

    def __init__(
        self,
        process: Callable[[], ChildProcess],
        start: Callable[[], object],
        cost: str,
        most: int | None,
    ) -> None:
        self._current = process
        self._start = start
        self._cost = cost
        self._restarts = Restarts(most)
        # Of one that is on its way, None; likewise, when the next one starts.
        self._serves_since: float | None = time.monotonic()
        self._starts_at: float | None = None

    @property
    def process(self) -> ChildProcess:
        """The present one; it may have ended."""
        return self._current()

    @property
    def serves(self) -> bool:
        """Whether it runs and is ready."""
        return self._serves_since is not None and self.process.running

    def step(self, missing: str = "") -> list[str]:
        """Look, and do what is due. Raises ClusterError where it ends again and again.

        Args:
            missing: What it cannot start without; empty: nothing.
        """
        process = self.process
        if process.running:
            return self._look(process)
        lines = []
        if self._starts_at is None:
            lines = [self._plan(process, missing)]
        assert self._starts_at is not None
        if not missing and time.monotonic() >= self._starts_at:
            self._starts_at = None
            self._start()
        return lines

    def _look(self, process: ChildProcess) -> list[str]:
        if self._serves_since is not None:
            return []
        try:
            process.read()
        except EaasError:
            # Its end follows, and is told with its last words.
            return []
        if process.address is None:
            return []
        self._serves_since = time.monotonic()
        return [f"{process.name} (pid {process.pid}) serves again"]

    def _plan(self, process: ChildProcess, missing: str) -> str:
        now = time.monotonic()
        served_s = now - self._serves_since if self._serves_since is not None else 0.0
        self._serves_since = None
        pause_s = self._restarts.pause_s(served_s)
        how = how_it_ended(process.process.returncode)
        if pause_s is None:
            raise ClusterError(
                f"{process.name} (pid {process.pid}) {how}, again and again; "
                f"its last words: {process.last_words()}"
            )
        self._starts_at = now + pause_s
        when = f"once {missing} runs" if missing else "now" if pause_s == 0 else f"in {pause_s:g} s"
        return f"{process.name} (pid {process.pid}) {how}; {self._cost}; it starts again {when}"
