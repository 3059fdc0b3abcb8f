"""A bar on standard error for commands that take a while."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["progress", "progress_bar"]


@contextmanager
def progress(text: str, steps: int) -> Iterator[Callable[[], None]]:
    """A bar while in the block, if standard error is a terminal; call what it gives after each step."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn(text), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=Console(file=sys.stderr), transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task(text, total=steps)
        yield lambda: bar.advance(task)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """The same for tasks that tell the part that is done, and what they are at."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description:>24}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    ) as bar:
        yield bar
