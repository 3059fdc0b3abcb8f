"""What a run measures."""

from __future__ import annotations

import resource
from dataclasses import dataclass

from eaas.bench.options import numbers, once
from eaas.errors import ConfigError

__all__ = ["Plan", "make_plan"]

# Of a process, beside its connections to members.
_OTHER_FILES = 256


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        members: Steps.
        watchers: How many members watch, in turn; all of them come last in every step.
        per_connection: Members that share a connection.
        loaders: Processes that simulate members.
        seconds: Of each measurement, once members have settled.
        interval_s: Between two heartbeats of a member.
        settle_s: Before a measurement.
        deaths: Of each kind, with each number of watchers.
        patience_s: For all members to join, and for all watchers to know.
    """

    members: tuple[int, ...]
    watchers: tuple[int, ...]
    per_connection: int
    loaders: int
    seconds: float
    interval_s: float = 1.0
    settle_s: float = 3.0
    deaths: int = 3
    patience_s: float = 300.0

    def watcher_steps(self, members: int) -> tuple[int, ...]:
        """How many of so many members watch, in turn."""
        return (*(w for w in self.watchers if w < members), members)


def make_plan(
    *, members: str, watchers: str, per_connection: int, loaders: int, seconds: float
) -> Plan:
    """A plan from the words of a command line.

    Raises:
        ConfigError: A word cannot be read, or the system does not allow that many open files.
    """
    steps = sorted(once(numbers("--members", members, least=2)))
    files = steps[-1] // per_connection + _OTHER_FILES
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files > most:
        raise ConfigError(
            f"--members {steps[-1]} needs {files} open files in the monitor, and the system allows {most}: "
            "raise `ulimit -Hn`, or let members share connections (--per-connection)"
        )
    return Plan(
        members=tuple(steps),
        watchers=tuple(sorted(once(numbers("--watchers", watchers)))),
        per_connection=per_connection,
        loaders=loaders,
        seconds=seconds,
    )
