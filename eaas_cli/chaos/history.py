"""The history of a chaos run: settings, requests, faults, resources. Times are monotonic seconds."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from eaas.net.server_records import started_at
from eaas_cli.bench.load import Asked

__all__ = ["Census", "History", "Incident", "Settings", "census", "still_running"]

_PROC = Path("/proc")
_SHARED = "/dev/shm/"


@dataclass(frozen=True)
class Settings:
    """Settings of a chaos run.

    Attributes:
        seed: Seed of faults and load.
        seconds: Duration of the faults.
        kinds: Some of `schedule.KINDS`.
        redundancy: Servers that hold each expert; at least 2.
        model: Path of the checkpoint; empty for a demo checkpoint.
    """

    seed: int
    seconds: float
    kinds: tuple[str, ...]
    servers: int = 4
    redundancy: int = 2
    transport: str = "shm"
    rate: float = 4.0
    max_tokens: int = 24
    model: str = ""


@dataclass(frozen=True)
class Incident:
    """An injected fault and the cluster's recovery.

    Attributes:
        kind: One of `schedule.KINDS`, such as "kill".
        mended_s: Time when its cause was removed.
        whole_s: Time when all servers served and every expert had all of its replicas; infinity if never.
        failure: Error of the recovery; empty if it succeeded.
    """

    kind: str
    target: str
    began_s: float
    mended_s: float
    whole_s: float
    failure: str = ""


@dataclass(frozen=True)
class Census:
    """Resources of one process of the cluster.

    Attributes:
        resident_bytes: Private memory; pages shared with the fork server are not counted.
        descriptors: Open files.
        segments: Mappings of shared memory.
    """

    pid: int
    resident_bytes: int
    descriptors: int
    segments: int


@dataclass(frozen=True)
class History:
    """The record of a whole chaos run, which `check` reads.

    Attributes:
        asked: Every request, in scheduled order.
        incidents: Every fault, in the order in which they ended.
        before: Resources by process name, before the first fault.
        after: The same after the last one, at rest.
        left_behind: Processes, namespaces and segments that outlived the cluster.
        between: Resources before the further requests that tell a leak from a settling heap, if any.
    """

    redundancy: int
    asked: tuple[Asked, ...]
    answers: tuple[str, ...]
    incidents: tuple[Incident, ...]
    before: dict[str, Census]
    after: dict[str, Census]
    left_behind: tuple[str, ...]
    between: dict[str, Census] | None = None


def census(pids: Mapping[str, int], births: Mapping[int, int]) -> dict[str, Census]:
    """Count the memory, open files and mappings of each live process, by process name, from /proc.

    A run does so before and after its faults; `check` compares the two.
    """
    alive = set(still_running(births))
    return {name: _census_of(pid) for name, pid in pids.items() if pid in alive}


def still_running(births: Mapping[int, int]) -> Iterable[int]:
    """Yield the pids among `births` (pid -> start time) that still run; a reused pid is another process."""
    return (pid for pid, born in births.items() if born and started_at(pid) == born)


def _census_of(pid: int) -> Census:
    proc = _PROC / str(pid)
    own = 0
    for line in (proc / "smaps_rollup").read_text().splitlines():
        field, _, value = line.partition(":")
        if field in ("Private_Clean", "Private_Dirty"):
            own += int(value.split()[0]) << 10
    segments = sum(_SHARED in line for line in (proc / "maps").read_text().splitlines())
    return Census(pid, own, len(os.listdir(proc / "fd")), segments)
