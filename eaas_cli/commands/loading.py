"""Shows how far the expert servers are with loading, while `eaas up` waits for them."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from eaas.log import print_line

if TYPE_CHECKING:
    from rich.text import Text

    from eaas.cluster_snapshot.loading import Loading
    from eaas_cli.local.interface import LaunchedCluster

__all__ = ["loading_shown", "loading_text", "print_lines"]


@contextlib.contextmanager
def loading_shown(cluster: LaunchedCluster) -> Iterator[Callable[[], None]]:
    """While the cluster starts, show how far its servers are with loading, at each call of the result."""
    from eaas_cli.local.loading import LoadingLines, LoadingPoller

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

    from eaas_cli.local.loading import loading_lines

    return Text("\n".join(loading_lines(loading)), "cyan", no_wrap=True, overflow="ellipsis")


def print_lines(lines: Iterable[str]) -> None:
    """Print lines, as they are."""
    for line in lines:
        print_line(line)
