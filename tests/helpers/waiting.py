"""Waiting for a condition in tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["eventually"]

T = TypeVar("T")


def eventually(condition: Callable[[], T], patience_s: float = 60.0, what: str = "it") -> T:
    """Wait until a condition is truthy, and return its value.

    Args:
        condition: Called every 20 ms.
        patience_s: Long against the scheduling of a busy machine.
        what: Subject of the failure's message.
    """
    deadline = time.monotonic() + patience_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {patience_s:g} s"
        time.sleep(0.02)
    return found
