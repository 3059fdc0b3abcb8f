"""Logging of the roles: one line an event, to standard error."""

from __future__ import annotations

import errno
import logging
import sys
import time
from typing import TextIO

__all__ = ["configure_logging", "get_logger", "print_line"]

_FULL = (errno.ENOSPC, errno.EDQUOT)


_FLOOD_S = 60.0
# Far more than one statement says in a healthy cluster.
_LINES = 100
_TRACEBACKS = 10


class _Flood(logging.Filter):
    """Lets a log statement write so many lines a minute, and says how many it held back.

    What a stranger can cause without an end must not fill the disk. A flood comes from one statement,
    whatever names and numbers it logs.
    """

    def __init__(self) -> None:
        super().__init__()
        # By statement: when its minute began, lines in it, and how many of them were held back.
        self._minutes: dict[tuple[str, int], tuple[float, int, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write a record."""
        site, now = (record.pathname, record.lineno), time.monotonic()
        began_s, lines, held = self._minutes.get(site, (now, 0, 0))
        if now - began_s >= _FLOOD_S:
            if held:
                record.msg = f"{record.getMessage()} ({held} like it were not logged)"
                record.args = None
            began_s, lines, held = now, 0, 0
        allowed = lines < (_TRACEBACKS if record.exc_info else _LINES)
        self._minutes[site] = (began_s, lines + 1, held + (not allowed))
        return allowed


def get_logger(name: str) -> logging.Logger:
    """The logger of a module."""
    return logging.getLogger(name)


def configure_logging(role: str, level: str = "INFO") -> None:
    """Send this process's log lines to standard error, marked with its role. Called by each role's main."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s %(levelname)s {role} %(name)s: %(message)s")
    )
    handler.addFilter(_Flood())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


def print_line(line: str, file: TextIO | None = None) -> None:
    """Print a line for people at once; it is lost where the disk is full: no process ends for that.

    Args:
        line: Without its end.
        file: By default standard output.
    """
    try:
        print(line, file=file or sys.stdout, flush=True)
    except OSError as error:
        if error.errno not in _FULL:
            raise
