"""How a thread computes beside the experts."""

from __future__ import annotations

import threading

import torch

from eaas.background import step_back

__all__ = ["compute_alone"]


def compute_alone() -> None:
    """`step_back`, and torch computes with one thread in this thread, and in no other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # That number would also be the one of threads that have not computed yet: they get the old one.
    restore = threading.Thread(target=torch.set_num_threads, args=(threads,))
    restore.start()
    restore.join()
    step_back()
