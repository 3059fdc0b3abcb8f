"""Tables on standard output, and progress bars on standard error for commands that take a while."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

__all__ = [
    "print_figures",
    "print_rows",
    "print_table",
    "progress",
    "progress_bar",
    "progress_of",
    "table_console",
]

_PIPED_WIDTH = 160
_WIDEST = 1000


def table_console() -> Console:
    """Make a console on standard output for tables: wide in a pipe, so that no address is cut off."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPED_WIDTH)


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Sequence[str] = (),
    title: str | None = None,
) -> None:
    """Print a table on standard output. All columns but the first and those in `left` are right-aligned.

    In a narrow terminal the lines run over, so that nothing is cut off.
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    for number, column in enumerate(columns):
        is_left = not number or column in left
        table.add_column(column, justify="left" if is_left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = table_console()
    natural = console.measure(table, options=console.options.update(max_width=_WIDEST)).maximum
    console.width = max(natural, console.width)
    console.print(table)


def print_rows(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = (), title: str | None = None
) -> None:
    """Print a line for each row of a document. A column is named as in the JSON; `a.b` is b in a.

    `columns`: names or their beginnings; empty: all that are no lists.
    """
    flat = [dict(_flat(row, "")) for row in rows]
    names = [
        name
        for name in dict.fromkeys(name for row in flat for name in row)
        if not columns or any(name == c or name.startswith(f"{c}.") for c in columns)
    ]
    # A heading has a line for each word, because most are longer than their figures.
    headings = [re.sub(r"[._]", "\n", name) for name in names]
    texts = [
        heading
        for heading, name in zip(headings, names, strict=True)
        if all(isinstance(row.get(name, ""), str) for row in flat)
    ]
    lines = [[_cell(row[name]) if name in row else "" for name in names] for row in flat]
    print_table(headings, lines, left=texts, title=title)


def print_figures(document: Mapping[str, Any]) -> None:
    """Print a line for each figure of a document that is no list, named as in `print_rows`."""
    print_table(("", ""), [(name, _cell(value)) for name, value in _flat(document, "")])


def _flat(document: Mapping[str, Any], within: str) -> Iterator[tuple[str, Any]]:
    for name, value in document.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{within}{name}.")
        elif not isinstance(value, list):
            yield f"{within}{name}", value


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        # Without an exponent, so that a column can be compared at a glance.
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if type(value) is int else str(value)


@contextmanager
def progress(text: str, steps: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar with `steps` equal steps; the caller calls the result after each step."""
    with progress_bar() as bar:
        task = bar.add_task(text, total=steps)
        yield lambda: bar.advance(task)


@contextmanager
def progress_of(text: str) -> Iterator[Callable[..., None]]:
    """Show a progress bar; the caller calls the result with the part done, 0 to 1, or another `text`."""
    with progress_bar() as bar:
        task = bar.add_task(text, total=1.0)
        yield lambda part=None, text=None: bar.update(task, completed=part, description=text)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Make a progress bar on standard error; it is hidden unless that is a terminal."""
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
