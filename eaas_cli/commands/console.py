"""The console of commands that print tables."""

from __future__ import annotations

from rich.console import Console

__all__ = ["table_console"]

_PIPED_WIDTH = 160


def table_console() -> Console:
    """A console that is wide in a pipe, which has no width: a cut-off address would be useless."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPED_WIDTH)
