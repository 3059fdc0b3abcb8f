"""What happened in a run: requests, faults, resources. Times are monotonic seconds."""

from __future__ import annotations

from dataclasses import dataclass

from eaas.bench.stream import Answer

__all__ = ["Asked", "Census", "History", "Incident"]


@dataclass(frozen=True)
class Asked:
    """A request.

    Attributes:
        prompt: Which of the prompts.
        due_s: When it was to be sent.
        answer: What became of it; None: it was still waited for when the run gave up.
    """

    prompt: int
    due_s: float
    answer: Answer | None


@dataclass(frozen=True)
class Incident:
    """A fault as it was.

    Attributes:
        kind: Of it.
        target: Whom it met.
        began_s: When.
        mended_s: When its cause was over.
        whole_s: When all servers served and every expert had all of its replicas; infinity: never.
        failure: What went wrong in mending it; empty: nothing.
    """

    kind: str
    target: str
    began_s: float
    mended_s: float
    whole_s: float
    failure: str = ""


@dataclass(frozen=True)
class Census:
    """What one process holds.

    Attributes:
        pid: Of it.
        resident_bytes: Of its own memory: what it shares with whom it was forked from is not counted.
        descriptors: Open files.
        segments: Mappings of shared memory.
    """

    pid: int
    resident_bytes: int
    descriptors: int
    segments: int


@dataclass(frozen=True)
class History:
    """A whole run.

    Attributes:
        redundancy: Servers that held each expert.
        asked: Every request, in the order in which they were due.
        answers: The right text for each prompt.
        incidents: Every fault, in the order of their ends.
        before: Of every process, by name, before the first fault.
        after: The same after the last one, at rest.
        left_behind: Processes, namespaces and segments that outlived the cluster.
        between: Of every process, where memory had grown and more requests were to tell if it settles.
    """

    redundancy: int
    asked: tuple[Asked, ...]
    answers: tuple[str, ...]
    incidents: tuple[Incident, ...]
    before: dict[str, Census]
    after: dict[str, Census]
    left_behind: tuple[str, ...]
    between: dict[str, Census] | None = None
