"""Priorities of an expert server's threads that load or share weights while its loop serves requests."""

from __future__ import annotations

import os
import threading

import torch

__all__ = ["compute_alone", "step_back"]

# Such a thread gets a tenth of a contended core, and all of an idle one.
_STEPS = 10
_LOWEST = 19


def step_back() -> None:
    """Lower the calling thread's priority for good: serving precedes its reads or loads of weights."""
    thread = threading.get_native_id()
    now = os.getpriority(os.PRIO_PROCESS, thread)
    os.setpriority(os.PRIO_PROCESS, thread, min(_LOWEST, now + _STEPS))


def compute_alone() -> None:
    """Lower the calling thread's priority, and limit torch to one thread in it; others keep theirs.

    For a load while experts are held, whose kernel needs the cores.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # The limit would also apply to threads that have not computed yet; this restores theirs.
    restore = threading.Thread(target=torch.set_num_threads, args=(threads,))
    restore.start()
    restore.join()
    step_back()
