"""The operator's wish to end, as something that a launcher can wait for."""

from __future__ import annotations

import select
import signal
import time

from eaas.shutdown import SignalLine

__all__ = ["Interrupt", "Interrupted"]


class Interrupted(Exception):
    """A person, or the system, wants the cluster to end."""


class Interrupt(SignalLine):
    """Within `with Interrupt() as interrupt`, Ctrl-C, SIGTERM and SIGHUP end `interrupt.wait`.

    No exception out of a signal handler: it could come between the start of a process and the note of it, or
    in the middle of the end.
    """

    def __init__(self) -> None:
        super().__init__(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._told = False

    @property
    def fd(self) -> int:
        """Readable where `check` may have something to say."""
        return self._reader.fileno()

    def check(self) -> None:
        """Raises Interrupted if such a signal has come, now or before."""
        while not self._told and select.select([self._reader], [], [], 0)[0]:
            self._told = self._reader.recv(1)[0] in self._signals
        if self._told:
            raise Interrupted

    def wait(self, timeout_s: float) -> None:
        """Sleep for that long. Raises Interrupted as soon as a signal has come."""
        deadline = time.monotonic() + timeout_s
        self.check()
        while (left := deadline - time.monotonic()) > 0:
            select.select([self._reader], [], [], left)
            self.check()
