"""In the launcher: a process that the fork server or a person started, held by its pidfd."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import weakref

__all__ = ["UNKNOWN_CODE", "PidfdProcess"]

UNKNOWN_CODE = 255
"""Reported exit code if the real one is unknown."""


class PidfdProcess:
    """The part of `subprocess.Popen` that the launcher needs, for a process that it did not execute itself.

    Args:
        pidfd: The process's pidfd; closed with this object.

    Attributes:
        returncode: None until `poll` or `wait` saw the end; 255 if unknown.
    """

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.pidfd = pidfd
        weakref.finalize(self, os.close, pidfd)
        self._reaping = threading.Lock()

    def poll(self) -> int | None:
        """Get the exit code, negative for a signal; None while the process runs."""
        return self._poll(0.0)

    def wait(self, timeout: float) -> int:
        """Wait for the end of the process; return its exit code. Raises subprocess.TimeoutExpired."""
        code = self._poll(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            # Signal by pidfd, because the pid may have been reused.
            signal.pidfd_send_signal(self.pidfd, number)

    def exit_code(self) -> int:
        """Exit code of the process, which has ended: here unknown. Subclasses ask its parent; called once."""
        return UNKNOWN_CODE

    def _poll(self, timeout_s: float) -> int | None:
        ended = _has_ended(self.pidfd, timeout_s)
        with self._reaping:
            if self.returncode is None and ended:
                self.returncode = self.exit_code()
            return self.returncode


def _has_ended(pidfd: int, timeout_s: float) -> bool:
    # poll() instead of select(), because a launcher may have more than 1024 descriptors.
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))
