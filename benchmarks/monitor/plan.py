"""The plan of `python -m benchmarks.monitor`, from its command line."""

from __future__ import annotations

import resource
from dataclasses import dataclass

from eaas.errors import ConfigError
from eaas_cli.option_values import numbers, once

__all__ = ["Plan", "make_plan"]

# Open files of a process in addition to its connections.
_OTHER_FILES = 256


@dataclass(frozen=True)
class Plan:
    """Numbers of members and watchers, and durations, that a run measures.

    Attributes:
        members: Numbers of members, one step each.
        watchers: Numbers of watchers in a step; the last is always all members.
        snapshot_watchers: Watchers that fetch snapshots at the same time, again and again.
        per_connection: Members that share a connection.
        loaders: Processes that simulate members.
        seconds: Seconds of each measurement.
        settle_s: Seconds before a measurement.
        deaths: Number of ends of each kind (death, goodbye), for each number of watchers.
        patience_s: Deadline for all members to join.
    """

    members: tuple[int, ...]
    watchers: tuple[int, ...]
    per_connection: int
    loaders: int
    seconds: float
    snapshot_watchers: int = 100
    interval_s: float = 1.0
    settle_s: float = 3.0
    deaths: int = 3
    patience_s: float = 300.0

    def watcher_steps(self, members: int) -> tuple[int, ...]:
        """Numbers of watchers to measure in a step with this many members."""
        return (*(w for w in self.watchers if w < members), members)


def make_plan(
    *,
    members: str,
    watchers: str,
    per_connection: int,
    loaders: int,
    seconds: float,
    snapshot_watchers: int = 100,
) -> Plan:
    """Check the options of `python -m benchmarks.monitor` and make a plan.

    Raises ConfigError: an option is wrong, or the limit of open files is too low.
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
        snapshot_watchers=snapshot_watchers,
    )
