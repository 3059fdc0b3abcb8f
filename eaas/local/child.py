"""The child's side of a local cluster: it says when it is ready, and ends with its launcher."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal

__all__ = [
    "ENDED_VARIABLE",
    "PARENT_VARIABLE",
    "READY_VARIABLE",
    "announce",
    "bind_to_launcher",
    "ended_pids",
]

READY_VARIABLE = "_EAAS_READY_FD"
PARENT_VARIABLE = "_EAAS_LAUNCHER_PID"
ENDED_VARIABLE = "_EAAS_ENDED_PIDS"
_PR_SET_PDEATHSIG = 1


def bind_to_launcher() -> None:
    """Have the kernel send SIGTERM to this process when its launcher ends, however that happens.

    Does nothing in a process that was started by hand.
    """
    launcher = os.environ.get(PARENT_VARIABLE)
    if launcher is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # It may have ended before the call above.
    if os.getppid() != int(launcher):
        os.kill(os.getpid(), signal.SIGTERM)


def ended_pids() -> list[int]:
    """Of the former processes of this name, which the launcher saw end; the latest is the last."""
    return [int(pid) for pid in os.environ.get(ENDED_VARIABLE, "").split()]


def announce(**facts: object) -> None:
    """Tell the launcher something: `ready=address`, `kernel=description` or `error=message`.

    Does nothing in a process that was started by hand.
    """
    fd = os.environ.get(READY_VARIABLE)
    if fd is None:
        return
    # A launcher that is gone does not read; its end is dealt with elsewhere.
    with contextlib.suppress(BrokenPipeError):
        os.write(int(fd), (json.dumps(facts) + "\n").encode())
