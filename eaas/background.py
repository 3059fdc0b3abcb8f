"""Threads that work while requests are served: what requests wait for comes first."""

from __future__ import annotations

import os
import threading

__all__ = ["step_back"]

# It gets a tenth of a core for which both compete, and all of one that is idle.
_STEPS = 10
_LAST = 19


def step_back() -> None:
    """Lets the usual threads of this process and others go first, for as long as this thread lives."""
    thread = threading.get_native_id()
    now = os.getpriority(os.PRIO_PROCESS, thread)
    os.setpriority(os.PRIO_PROCESS, thread, min(_LAST, now + _STEPS))
