"""How far the expert servers are with loading, for `eaas up`: shown live, or printed now and then."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from eaas.log import print_line

if TYPE_CHECKING:
    from rich.text import Text

    from eaas.cluster_snapshot.loading import Loading, LoadingFold
    from eaas.membership.monitors import Monitors
    from eaas_cli.local.interface import LaunchedCluster

__all__ = ["LoadingLines", "LoadingPoller", "loading_shown", "loading_text", "print_lines"]

_ASK_S = 0.5
# Intervals of the polls while experts load, and otherwise. A load that is shorter than these is not shown.
_POLL_S = 1.0
_IDLE_POLL_S = 3.0
# How long experts load before the first printed line, and the interval of the lines.
_FIRST_S = 3.0
_LINE_S = 10.0


class LoadingPoller:
    """Polls the cluster's monitor for servers that load experts. Not thread-safe; close it.

    Args:
        cluster: It may still be starting; until its monitor has an address, nothing loads.
        clock: Monotonic seconds.
    """

    def __init__(
        self, cluster: LaunchedCluster, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._monitors: Monitors | None = None
        self._fold: LoadingFold | None = None
        self._loading: Mapping[str, Loading] = {}
        self._due_at = clock() + _IDLE_POLL_S

    def poll(self) -> Mapping[str, Loading]:
        """Return the progress by server; asks the monitor once a second at most. Blocks up to 0.5 s.

        Empty if nothing loads, or if the monitor does not answer.
        """
        if self._clock() >= self._due_at and self._cluster.monitor_address:
            self._loading = self._ask()
            self._due_at = self._clock() + (_POLL_S if self._loading else _IDLE_POLL_S)
        return self._loading

    def close(self) -> None:
        """Close the connection to the monitor."""
        if self._monitors is not None:
            self._monitors.close()

    def _ask(self) -> Mapping[str, Loading]:
        # Imported here: a short start needs no gRPC in the launcher.
        import grpc

        from eaas.cluster_snapshot.loading import LoadingFold
        from eaas.membership.monitors import Monitors

        if self._monitors is None or self._fold is None:
            self._monitors = Monitors(self._cluster.monitor_address, self._cluster.tls)
            self._fold = LoadingFold()
        monitor = self._monitors.now
        try:
            members = monitor.members(_ASK_S)
        except grpc.RpcError as error:
            self._monitors.leave(monitor, error)
            return {}
        return self._fold.take(members or (), self._clock())


class LoadingLines:
    """Decides when to print the progress where a line cannot be updated. No I/O, no clock."""

    def __init__(self) -> None:
        self._due_at: float | None = None

    def take(self, loading: Mapping[str, Loading], now: float) -> list[str]:
        """Take the progress at a time; return the lines to print now: none unless the load takes a while."""
        if not loading:
            self._due_at = None
            return []
        if self._due_at is None:
            self._due_at = now + _FIRST_S
        if now < self._due_at:
            return []
        self._due_at = now + _LINE_S
        return _lines(loading)


def _lines(loading: Mapping[str, Loading]) -> list[str]:
    return [f"{server} loads {progress.text}" for server, progress in sorted(loading.items())]


@contextlib.contextmanager
def loading_shown(cluster: LaunchedCluster) -> Iterator[Callable[[], None]]:
    """Yield a function that shows how far the servers are, to be called while the cluster starts."""
    with contextlib.closing(LoadingPoller(cluster)) as poller:
        if not sys.stdout.isatty():
            lines = LoadingLines()
            yield lambda: print_lines(lines.take(poller.poll(), time.monotonic()))
            return
        from rich.live import Live

        with Live(auto_refresh=False, transient=True) as live:
            yield lambda: live.update(loading_text(poller.poll()), refresh=True)


def loading_text(loading: Mapping[str, Loading]) -> Text:
    """Format the progress of loads for a live display."""
    from rich.text import Text

    return Text("\n".join(_lines(loading)), "cyan", no_wrap=True, overflow="ellipsis")


def print_lines(lines: Iterable[str]) -> None:
    """Print lines, as they are."""
    for line in lines:
        print_line(line)
