"""A process known by its pidfd, which `subprocess` did not start."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import weakref

__all__ = ["UNKNOWN_CODE", "PidfdProcess"]

UNKNOWN_CODE = 255
"""Exit code of a process whose real one is unknown."""


class PidfdProcess:
    """The part of `subprocess.Popen` that a launcher needs.

    Args:
        pidfd: Its pidfd; closed with this object.

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
        """The exit code, negative for a signal; None while the process runs."""
        return self._poll(0.0)

    def wait(self, timeout: float) -> int:
        """Wait for the end of the process. Raises subprocess.TimeoutExpired."""
        code = self._poll(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            # By pidfd: the pid may have been reused.
            signal.pidfd_send_signal(self.pidfd, number)

    def exit_code(self) -> int:
        """Exit code of the process, which has ended; called once."""
        return UNKNOWN_CODE

    def _poll(self, timeout_s: float) -> int | None:
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
