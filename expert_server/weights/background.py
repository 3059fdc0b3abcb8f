"""Priorities of threads that work while requests are served."""

from __future__ import annotations

import os
import threading

import torch

__all__ = ["compute_alone", "step_back"]

# Such a thread gets a tenth of a contended core, and all of an idle one.
_STEPS = 10
_LOWEST = 19


def step_back() -> None:
    """Lower the priority of the calling thread, permanently, so that serving has precedence."""
    thread = threading.get_native_id()
    now = os.getpriority(os.PRIO_PROCESS, thread)
    os.setpriority(os.PRIO_PROCESS, thread, min(_LOWEST, now + _STEPS))


def compute_alone() -> None:
    """Lower the priority of the calling thread, and limit torch to one thread in this thread only."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # The limit would also apply to threads that have not computed yet; this restores theirs.
    restore = threading.Thread(target=torch.set_num_threads, args=(threads,))
    restore.start()
    restore.join()
    step_back()
