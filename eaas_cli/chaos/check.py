"""Invariants of a chaos run. Pure: a history in, violations out.

Every answer is right or one typed error. No request fails while every expert has a live replica, whatever
happens to attention clients. The cluster recovers from every fault. It holds the same resources afterwards as
before, and nothing outlives it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from eaas_cli.bench.load import Asked
from eaas_cli.chaos.history import Census, History, Incident

__all__ = ["MEMORY_GROWTH", "check", "excused", "may_be_warm_up", "settled"]

MEMORY_GROWTH = 0.02
"""Allowed growth of the memory of all processes together, as a share."""
# A growth between two shares may come from a heap that has not settled. The first pair applies to runs with
# fewer than _ENOUGH_REQUESTS requests, the second to longer runs.
_ENOUGH_REQUESTS = 1500
_SHORT_RUN_GROWTH = (0.01, 0.07)
_LONG_RUN_GROWTH = (MEMORY_GROWTH, 2 * MEMORY_GROWTH)
# Allowed growth during the further requests. A settling heap grows in steps of some MiB; a leak of 20 KB per
# request grows twice as much in 1,500 requests. After a long run the heap has had time to settle.
_SETTLED_BYTES = 15 << 20
_SETTLED_BYTES_LONG_RUN = 6 << 20
# Error type of a request that found no replica of an expert.
_NO_REPLICA = "experts_unavailable"


def check(history: History) -> list[str]:
    """Check the history of a chaos run after its end; return the violations, one line each."""
    wrong = [*_requests(history), *_faults(history.incidents), *_resources(history)]
    return wrong + [f"left behind: {what}" for what in history.left_behind]


def settled(
    history: History, more: Callable[[], tuple[tuple[Asked, ...], dict[str, Census]]]
) -> History:
    """Add further requests, and the resources after them, to a history in which memory may only have settled.

    `more` sends them, without faults.
    """
    if not may_be_warm_up(history.before, history.after, len(history.asked)):
        return history
    asked, after = more()
    return replace(history, asked=history.asked + asked, between=history.after, after=after)


def may_be_warm_up(before: dict[str, Census], after: dict[str, Census], requests: int) -> bool:
    """Whether memory grew so much that only further requests can tell a leak from a settling heap.

    A larger growth is a violation in any case.
    """
    least, most = _SHORT_RUN_GROWTH if requests < _ENOUGH_REQUESTS else _LONG_RUN_GROWTH
    return 1 + least < _resident(after) / _resident(before) <= 1 + most


def excused(asked: Asked, history: History) -> bool:
    """Whether a failed request is allowed, because an expert may have had no replica while it ran.

    That happens when both servers of an expert are lost at once.
    """
    answer = asked.answer
    return (
        answer is not None
        and history.redundancy <= 2
        and any(
            incident.kind == "pair"
            and incident.began_s <= answer.ended_s
            and answer.sent_s <= incident.whole_s
            for incident in history.incidents
        )
    )


def _requests(history: History) -> Iterable[str]:
    for number, asked in enumerate(history.asked):
        answer, name = asked.answer, f"request {number} (prompt {asked.prompt})"
        if answer is None:
            yield f"{name}: no end"
        elif not answer.error:
            if answer.text != history.answers[asked.prompt]:
                yield (
                    f"{name}: wrong answer {answer.text!r}, not {history.answers[asked.prompt]!r}"
                )
        elif not answer.error_type:
            yield f"{name}: an error without a type: {answer.error}"
        elif answer.error_type != _NO_REPLICA or not excused(asked, history):
            yield f"{name}: failed although a replica was alive: {answer.error}"
        elif not history.answers[asked.prompt].startswith(answer.text):
            yield f"{name}: wrong text {answer.text!r} before its error"


def _faults(incidents: Iterable[Incident]) -> Iterable[str]:
    for incident in incidents:
        if incident.failure:
            yield f"{incident.kind} of {incident.target}: {incident.failure}"
        elif math.isinf(incident.whole_s):
            yield f"{incident.kind} of {incident.target}: the cluster was not whole again in time"


def _resources(history: History) -> Iterable[str]:
    before, after = history.before, history.after
    if before.keys() != after.keys():
        yield f"processes: {', '.join(sorted(after))}; they were {', '.join(sorted(before))}"
        return
    for name in sorted(before):
        if after[name].descriptors != before[name].descriptors:
            yield f"{name}: {after[name].descriptors} descriptors, {before[name].descriptors} before"
        if after[name].segments != before[name].segments:
            yield f"{name}: {after[name].segments} segments, {before[name].segments} before"
    if history.between is None:
        allowed = _resident(before) * (1 + MEMORY_GROWTH)
        middle = ""
    else:
        # The further requests count as well. There are at most _ENOUGH_REQUESTS of them.
        long_run = len(history.asked) >= 2 * _ENOUGH_REQUESTS
        allowed = _resident(history.between) + (
            _SETTLED_BYTES_LONG_RUN if long_run else _SETTLED_BYTES
        )
        middle = f", {_mib(history.between)} MiB in between: it does not settle"
    if _resident(after) > allowed:
        yield (
            f"resident memory: {_mib(after)} MiB, {_mib(before)} MiB before{middle}"
            f" (grown in {_grown(before, after)})"
        )


def _grown(before: dict[str, Census], after: dict[str, Census]) -> str:
    """Name the processes whose memory grew, and by how many MiB, the largest growth first."""
    mib = {
        name: (after[name].resident_bytes - one.resident_bytes) / 2**20
        for name, one in before.items()
    }
    most = sorted((name for name in mib if mib[name] >= 0.1), key=lambda name: -mib[name])
    return ", ".join(f"{name}: {mib[name]:.1f}" for name in most)


def _resident(census: dict[str, Census]) -> int:
    return sum(one.resident_bytes for one in census.values())


def _mib(census: dict[str, Census]) -> str:
    return f"{_resident(census) / 2**20:.1f}"
