"""Supervision of a serving cluster: the launcher restarts frontend, attention clients and fork server."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from eaas.errors import ClusterError, EaasError
from eaas_cli.local.interface import CLIENT, FRONTEND, MONITOR, VLLM
from eaas_cli.local.process import how_it_ended
from eaas_cli.local.restart import Restarts, restart_line

if TYPE_CHECKING:
    from eaas_cli.local.cluster import LocalCluster
    from eaas_cli.local.process import ChildProcess

__all__ = ["Supervisor"]

_MOST_FAILURES = 5


class Supervisor:
    """Restarts a serving cluster's processes and reports their ends. Not thread-safe.

    It restarts the frontend, the attention clients and the fork server. It does not restart expert servers,
    monitor and balancer: serving continues without them, and a person starts them with the printed command.
    """

    def __init__(self, cluster: LocalCluster, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        # Pids whose end `step` has reported.
        self._reported: set[int] = set()
        self._restarted = [
            _Restarted(
                partial(cluster.children.__getitem__, name),
                partial(cluster.start_again, name),
                _cost(name),
                _MOST_FAILURES,
                clock,
            )
            for name in cluster.children
            if _is_restarted(name)
        ]
        self._fork_server = _Restarted(
            lambda: cluster.fork_server,
            cluster.start_fork_server,
            "the processes that it forked continue",
            None,
            clock,
        )

    def step(self) -> list[str]:
        """Check every process once, restart what is due, and return the lines to print. Never waits.

        `eaas up` calls it again and again until a signal.

        Raises ClusterError: the frontend or an attention client ends again and again.
        """
        lines = [
            f"{child.name} (pid {child.pid}) was started by hand; it ends with this cluster"
            for child in self._cluster.find_started_by_hand()
        ]
        lines += self._fork_server.step()
        if self.can_start:
            # None of them can register without a monitor.
            monitor = self._cluster.children[MONITOR]
            for each in self._restarted:
                lines += each.step("" if monitor.running else "the monitor")
        return lines + self._ends()

    @property
    def can_start(self) -> bool:
        """Whether the fork server is ready to start a process; else scaling and restarts wait."""
        return self._fork_server.serves

    def _ends(self) -> list[str]:
        """Lines on ended processes that it does not restart, once each: it left, or how to start it again."""
        ended = [
            child
            for child in self._cluster.ended()
            if child.pid not in self._reported and not _is_restarted(child.name)
        ]
        self._reported.update(child.pid for child in ended)
        return [
            f"{child.name} (pid {child.pid}) has left"
            if child.process.returncode == 0
            else f"{child.name} (pid {child.pid}) ended; start it again with:\n"
            f"  {restart_line(child.arguments)}\n"
            for child in ended
        ]


def _is_restarted(name: str) -> bool:
    return name in (FRONTEND, VLLM) or name.startswith(CLIENT)


def _cost(name: str) -> str:
    if name.startswith(CLIENT):
        return "its requests go on with another one, or once it serves again"
    return "its running requests are lost"


class _Restarted:
    """A process that the launcher restarts when it ends.

    Args:
        process: Returns the current process.
        start: Starts the next one; does not wait for it.
        cost: Consequence of its end, for the printed line.
        most: Restarts end after this many failures in a row; None for no limit.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        process: Callable[[], ChildProcess],
        start: Callable[[], object],
        cost: str,
        most: int | None,
        clock: Callable[[], float],
    ) -> None:
        self._current = process
        self._start = start
        self._cost = cost
        self._most = most
        self._clock = clock
        self._restarts = Restarts(serves_since=clock())

    @property
    def process(self) -> ChildProcess:
        """The current process, the first or a restarted one; it may have ended."""
        return self._current()

    @property
    def serves(self) -> bool:
        """Whether the process runs and is ready, as far as the last `step` knows."""
        return self._restarts.serves_since is not None and self.process.running

    def step(self, missing: str = "") -> list[str]:
        """Plan or do the restart if the process has ended; return the lines to print. Never waits.

        `missing`: a dependency that does not run; empty if none. Raises ClusterError after too many failures.
        """
        process = self.process
        if process.running:
            return self._check_ready(process)
        restarts = self._restarts
        lines = [self._plan(process, missing)] if restarts.starts_at is None else []
        assert restarts.starts_at is not None
        if not missing and self._clock() >= restarts.starts_at:
            restarts.starts_at = None
            self._start()
        return lines

    def _check_ready(self, process: ChildProcess) -> list[str]:
        if self._restarts.serves_since is not None:
            return []
        try:
            process.read()
        except EaasError:
            # The next `step` reports the end.
            return []
        if process.address is None:
            return []
        self._restarts.serves_since = self._clock()
        return [f"{process.name} (pid {process.pid}) serves again"]

    def _plan(self, process: ChildProcess, missing: str) -> str:
        pause_s = self._restarts.ended(self._clock())
        how = how_it_ended(process.process.returncode)
        if self._most is not None and self._restarts.failures > self._most:
            raise ClusterError(
                f"{process.name} (pid {process.pid}) {how}, again and again; "
                f"its last words: {process.last_words()}"
            )
        when = f"once {missing} runs" if missing else "now" if pause_s == 0 else f"in {pause_s:g} s"
        return f"{process.name} (pid {process.pid}) {how}; {self._cost}; it starts again {when}"
