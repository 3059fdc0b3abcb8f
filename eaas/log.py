"""Logging of all roles: one line per event, to standard error."""

from __future__ import annotations

import errno
import logging
import sys
import textwrap
import time
from typing import TextIO

__all__ = ["configure_logging", "get_logger", "one_line", "print_line"]

_FULL = (errno.ENOSPC, errno.EDQUOT)

_SHOWN = 300  # characters
_FLOOD_S = 60.0
# Limit per log statement in this time; far more than a healthy cluster writes.
_LINES = 100
_TRACEBACKS = 10


class _Flood(logging.Filter):
    """Log filter that limits the lines per minute of each log statement, and logs how many it dropped.

    Without the limit, anybody who can connect could fill the disk.
    """

    def __init__(self) -> None:
        super().__init__()
        # By statement: start of its minute, lines since then, and how many of these were dropped.
        self._minutes: dict[tuple[str, int], tuple[float, int, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write a log record: False above its statement's limit for the current minute."""
        site, now = (record.pathname, record.lineno), time.monotonic()
        began_s, lines, dropped = self._minutes.get(site, (now, 0, 0))
        if now - began_s >= _FLOOD_S:
            if dropped:
                record.msg = f"{record.getMessage()} ({dropped} similar lines were dropped)"
                record.args = None
            began_s, lines, dropped = now, 0, 0
        allowed = lines < (_TRACEBACKS if record.exc_info else _LINES)
        self._minutes[site] = (began_s, lines + 1, dropped + (not allowed))
        return allowed


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module."""
    return logging.getLogger(name)


def configure_logging(role: str) -> None:
    """Send logs to standard error, with the role in each line. Called by each role's main."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s %(levelname)s {role} %(name)s: %(message)s")
    )
    handler.addFilter(_Flood())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)


def one_line(error: Exception) -> str:
    """Return a library's words in one line, for a message of ours: shortened, the class if it has none."""
    name, text = type(error).__name__, str(error)
    # The words of a KeyError are only the key.
    text = f"{name}: {text}" if isinstance(error, KeyError) else text
    return textwrap.shorten(text, _SHOWN, placeholder=" ...") or name


def print_line(line: str, file: TextIO | None = None) -> None:
    """Print a line and flush; ignore a full disk, so that the process continues.

    Args:
        line: Without a line break.
        file: Standard output by default.
    """
    try:
        print(line, file=file or sys.stdout, flush=True)
    except OSError as error:
        if error.errno not in _FULL:
            raise
