"""Logging of the roles: one line an event, to standard error."""

from __future__ import annotations

import errno
import logging
import sys
from typing import TextIO

__all__ = ["configure_logging", "get_logger", "print_line"]

_FULL = (errno.ENOSPC, errno.EDQUOT)


def get_logger(name: str) -> logging.Logger:
    """The logger of a module."""
    return logging.getLogger(name)


def configure_logging(role: str, level: str = "INFO") -> None:
    """Send this process's log lines to standard error, marked with its role. Called by each role's main."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s %(levelname)s {role} %(name)s: %(message)s")
    )
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
