"""The history of a chaos run: requests, faults, resources. Times are monotonic seconds."""

from __future__ import annotations

from dataclasses import dataclass

from eaas_cli.bench.load import Asked

__all__ = ["Census", "History", "Incident"]


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
