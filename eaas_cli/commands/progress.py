"""Progress bars on standard error for commands that take a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["progress", "progress_bar"]


@contextmanager
def progress(text: str, steps: int) -> Iterator[Callable[[], None]]:
    """Show a bar with a number of equal steps; call the result after each step."""
    with progress_bar() as bar:
        task = bar.add_task(text, total=steps)
        yield lambda: bar.advance(task)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Show a bar, if standard error is a terminal."""
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
