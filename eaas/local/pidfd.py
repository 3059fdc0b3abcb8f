"""A process that `subprocess` did not start, known by its pidfd."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import weakref

__all__ = ["UNKNOWN_CODE", "PidfdProcess"]

UNKNOWN_CODE = 255
"""The exit code of a process whose exit code nobody can tell."""


class PidfdProcess:
    """As much of `subprocess.Popen` as a launcher needs.

    Args:
        pid: Process id.
        pidfd: Of the same process; closed with this object.

    Attributes:
        pid: Process id.
        returncode: None until `poll` or `wait` have seen the end; 255 where nobody knows it.
    """

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.pidfd = pidfd
        weakref.finalize(self, os.close, pidfd)
        self._reaping = threading.Lock()

    def poll(self) -> int | None:
        """The exit code, negative for a signal, as of `Popen`; None while it runs."""
        return self._look(0.0)

    def wait(self, timeout: float) -> int:
        """Wait for the end. Raises subprocess.TimeoutExpired."""
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            # Not by its number: that may be another's by now.
            signal.pidfd_send_signal(self.pidfd, number)

    def exit_code(self) -> int:
        """Of the process, which has ended; called once."""
        return UNKNOWN_CODE

    def _look(self, timeout_s: float) -> int | None:
        ended = _has_ended(self.pidfd, timeout_s)
        with self._reaping:
            if self.returncode is None and ended:
                self.returncode = self.exit_code()
            return self.returncode


def _has_ended(pidfd: int, timeout_s: float) -> bool:
    # Not select(): a launcher may have more than 1024 descriptors.
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))
