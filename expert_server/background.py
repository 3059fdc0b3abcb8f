"""Threads that work while requests are served: the experts come first."""

from __future__ import annotations

import os
import threading

import torch

__all__ = ["compute_alone", "step_back"]

# It gets a tenth of a core for which both compete, and all of one that is idle.
_STEPS = 10
_LAST = 19


def step_back() -> None:
    """Lets the usual threads of this process and others go first, for as long as this thread lives."""
    thread = threading.get_native_id()
    now = os.getpriority(os.PRIO_PROCESS, thread)
    os.setpriority(os.PRIO_PROCESS, thread, min(_LAST, now + _STEPS))


def compute_alone() -> None:
    """`step_back`, and torch computes with one thread in this thread, and in no other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # That number would also be the one of threads that have not computed yet: they get the old one.
    restore = threading.Thread(target=torch.set_num_threads, args=(threads,))
    restore.start()
    restore.join()
    step_back()
