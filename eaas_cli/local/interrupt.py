"""In the launcher and `eaas autoscale`: Ctrl-C and termination signals as an event to wait for."""

from __future__ import annotations

import select
import signal
import time

from eaas.shutdown import SignalLine

__all__ = ["Interrupt", "Interrupted"]


class Interrupted(Exception):
    """A signal asked this process to end: its command ends the child processes, if any, and returns.

    Attributes:
        code: Exit code of a command that had not done its work: 128 + the signal's number, as in a shell.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.code = 128 + number


class Interrupt(SignalLine):
    """Within `with Interrupt() as interrupt`, Ctrl-C, SIGTERM and SIGHUP end `interrupt.wait`.

    A signal handler raises nothing: an exception could come between the start of a process and its record, or
    during the shutdown. After the block, further signals change nothing if one has come: the command ends,
    and a second Ctrl-C must not turn its exit code into that of a kill.
    """

    def __init__(self) -> None:
        super().__init__(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._number = 0

    def __exit__(self, *error: object) -> None:
        if self._has_come():
            # Of Python functions, the interpreter restores the default long before the process ends.
            self._previous = dict.fromkeys(self._previous, signal.SIG_IGN)
        super().__exit__(*error)

    @property
    def fd(self) -> int:
        """Descriptor that is readable when a signal may have come, for a selector; then call `check`."""
        return self._reader.fileno()

    def check(self) -> None:
        """Raise Interrupted if a signal has come, now or before an earlier check."""
        if self._has_come():
            raise Interrupted(self._number)

    def wait(self, timeout_s: float) -> None:
        """Sleep for `timeout_s`. Raises Interrupted as soon as a signal comes."""
        deadline = time.monotonic() + timeout_s
        self.check()
        while (left := deadline - time.monotonic()) > 0:
            select.select([self._reader], [], [], left)
            self.check()

    def _has_come(self) -> bool:
        while not self._number and select.select([self._reader], [], [], 0)[0]:
            number = self._reader.recv(1)[0]
            self._number = number if number in self._signals else 0
        return self._number != 0
