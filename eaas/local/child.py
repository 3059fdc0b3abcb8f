"""The child's side of a local cluster: it says when it is ready, and ends with its launcher."""

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
"""Names the read end of a pipe whose write end the launcher alone holds, and never writes to."""
ENDED_VARIABLE = "_EAAS_ENDED_PIDS"
# From <fcntl.h>; the module `fcntl` does not have it.
_F_SETSIG = 10

_bound_fd: int | None = None


def bind_to_launcher() -> None:
    """Have the kernel send SIGTERM to this process when its launcher ends, for whatever reason.

    The parent may be another process, and may end before. Does nothing in a process that a person started.
    """
    global _bound_fd
    fd = os.environ.get(LAUNCHER_VARIABLE)
    if fd is None:
        return
    if _bound_fd is not None:
        # It came with the fork, and signals the process that forked.
        os.close(_bound_fd)
    # The receiver of the signal belongs to the open file, which all children share: each opens its own.
    _bound_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.fcntl(_bound_fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(_bound_fd, _F_SETSIG, signal.SIGTERM)
    flags = fcntl.fcntl(_bound_fd, fcntl.F_GETFL)
    fcntl.fcntl(_bound_fd, fcntl.F_SETFL, flags | os.O_ASYNC)
    # The launcher may have ended before the calls above. The end of the file says so.
    with contextlib.suppress(BlockingIOError):
        os.read(_bound_fd, 1)
        os.kill(os.getpid(), signal.SIGTERM)


def has_same_launcher(pid: int) -> bool:
    """Whether the launcher of this process has started another one, which lives."""
    fd = os.environ.get(LAUNCHER_VARIABLE)
    if fd is None:
        return False
    try:
        # All its processes have the pipe, under the same number.
        return os.readlink(f"/proc/{pid}/fd/{fd}") == os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return False


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
