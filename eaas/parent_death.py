"""Programs that end with the process that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["end_with_parent"]

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, number: signal.Signals, what: str) -> None:
    """Ask the kernel to signal this process when its parent ends; exit if it has ended already.

    Args:
        parent: Process id of the parent.
        number: The signal.
        what: Name of the parent, for the message.

    Raises:
        OSError: The kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # The parent may have ended before the call above.
    if os.getppid() != parent:
        sys.exit(f"{what} has ended")
