"""The child's side of a local launcher (`eaas up`): report readiness, and end with the launcher."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal

__all__ = [
    "ENDED_VARIABLE",
    "LAUNCHER_VARIABLE",
    "READY_VARIABLE",
    "announce",
    "bind_to_launcher",
    "ended_pids",
    "has_same_launcher",
]

READY_VARIABLE = "_EAAS_READY_FD"
LAUNCHER_VARIABLE = "_EAAS_LAUNCHER_FD"
"""Read end of a pipe; only the launcher holds the write end, and it never writes."""
ENDED_VARIABLE = "_EAAS_ENDED_PIDS"
# From <fcntl.h>; missing in the module `fcntl`.
_F_SETSIG = 10

_bound_fd: int | None = None


def bind_to_launcher() -> None:
    """Make the kernel send SIGTERM to this process when its launcher ends.

    The launcher may not be the parent. Does nothing in a process started by hand.
    """
    global _bound_fd
    fd = os.environ.get(LAUNCHER_VARIABLE)
    if fd is None:
        return
    if _bound_fd is not None:
        # A descriptor inherited through a fork would signal the parent.
        os.close(_bound_fd)
    # The signal's receiver belongs to the open file description, so each child opens its own.
    _bound_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.fcntl(_bound_fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(_bound_fd, _F_SETSIG, signal.SIGTERM)
    flags = fcntl.fcntl(_bound_fd, fcntl.F_GETFL)
    fcntl.fcntl(_bound_fd, fcntl.F_SETFL, flags | os.O_ASYNC)
    # The launcher may have ended before the calls above; then the pipe is at its end.
    with contextlib.suppress(BlockingIOError):
        os.read(_bound_fd, 1)
        os.kill(os.getpid(), signal.SIGTERM)


def has_same_launcher(pid: int) -> bool:
    """Whether a live process has this one's launcher; the dashboard signals only such expert servers."""
    fd = os.environ.get(LAUNCHER_VARIABLE)
    if fd is None:
        return False
    try:
        # All processes of a launcher have the pipe under the same number.
        return os.readlink(f"/proc/{pid}/fd/{fd}") == os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return False


def ended_pids() -> list[int]:
    """Pids of earlier processes of this id that the launcher saw end, for the monitor; latest last."""
    return [int(pid) for pid in os.environ.get(ENDED_VARIABLE, "").split()]


def announce(**facts: object) -> None:
    """Tell the launcher that this process is ready or failed: `ready=address`, `kernel=...`, `error=...`.

    Does nothing in a process started by hand.
    """
    fd = os.environ.get(READY_VARIABLE)
    if fd is None:
        return
    # The launcher may have ended; `bind_to_launcher` handles that.
    with contextlib.suppress(BrokenPipeError):
        os.write(int(fd), (json.dumps(facts) + "\n").encode())
