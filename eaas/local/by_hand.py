"""Processes of a cluster that a person started again, with the line that the launcher printed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from eaas.local.pidfd import PidfdProcess
from eaas.local.process import ChildProcess

__all__ = ["StartedByHand", "find_started_by_hand"]

_PROC = Path("/proc")


def find_started_by_hand(name: str, arguments: Sequence[str]) -> StartedByHand | None:
    """The process of this user that runs `eaas` with these very arguments, if there is one.

    Args:
        name: Of the member.
        arguments: Of the `eaas` program; they name the member's cluster.
    """
    for pid in _own_pids():
        if not _runs(pid, arguments):
            continue
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        # Its number may have become another process's between the two calls.
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
            # It ended meanwhile.
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
    """A process that this one did not start: it can be watched and ended. Takes the pidfd over."""

    def __init__(self, name: str, arguments: Sequence[str], pid: int, pidfd: int) -> None:
        self.name = name
        self.arguments = tuple(arguments)
        self.ended_pids = ()
        self.address = self.kernel = None
        self.process = PidfdProcess(pid, pidfd)

    def read(self) -> None:
        """It tells the launcher nothing."""

    def last_words(self) -> str:
        """Its terminal has them."""
        return "(in the terminal that it was started from)"

    def reap(self, timeout_s: float) -> bool:
        """Wait for the end; False if it has not come in time."""
        try:
            self.process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            return False
        return True
