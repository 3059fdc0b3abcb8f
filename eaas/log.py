"""Logging of the roles: one line an event, to standard error."""

from __future__ import annotations

import logging
import sys

__all__ = ["configure_logging", "get_logger"]


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
