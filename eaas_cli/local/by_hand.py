"""In the launcher: finds the processes that a person restarted with the printed command, to adopt them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from eaas_cli.local.pidfd import PidfdProcess
from eaas_cli.local.process import ChildProcess

__all__ = ["StartedByHand", "find_started_by_hand"]

_PROC = Path("/proc")


def find_started_by_hand(name: str, arguments: Sequence[str]) -> StartedByHand | None:
    """Find this user's process that runs `eaas` with exactly these arguments, for `LocalCluster` to adopt.

    `arguments`: arguments of the `eaas` program; they name the member's cluster.
    """
    for pid in _own_pids():
        if not _runs(pid, arguments):
            continue
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        # The pid may have been reused between the two calls.
        if _runs(pid, arguments):
            return StartedByHand(name, arguments, pid, pidfd)
        os.close(pidfd)
    return None


def _own_pids() -> Iterator[int]:
    for entry in _PROC.iterdir():
        try:
            if entry.name.isdigit() and entry.stat().st_uid == os.geteuid():
                yield int(entry.name)
        except OSError:
            # The process ended during the search.
            continue


def _runs(pid: int, arguments: Sequence[str]) -> bool:
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")[:-1]
    except OSError:
        return False
    before = len(words) - len(arguments)
    return (
        before > 0
        and Path(os.fsdecode(words[before - 1])).name == "eaas"
        and [os.fsdecode(word) for word in words[before:]] == list(arguments)
    )


class StartedByHand(ChildProcess):
    """A role's process that a person started. The launcher watches it, and ends it with the cluster.

    Owns the pidfd.
    """

    def __init__(self, name: str, arguments: Sequence[str], pid: int, pidfd: int) -> None:
        self.name = name
        self.arguments = tuple(arguments)
        self.ended_pids = ()
        self.address = self.kernel = None
        self.process = PidfdProcess(pid, pidfd)

    def read(self) -> None:
        """Do nothing, because the process announces nothing to the launcher."""

    def last_words(self) -> str:
        """Text in place of the last log line, because the log is in the person's terminal."""
        return "(in the terminal that it was started from)"

    def reap(self, timeout_s: float) -> bool:
        """Wait for the end of the process, whose log is not the launcher's; False on timeout."""
        try:
            self.process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            return False
        return True
