"""What must hold of a run, whatever its faults were. Pure: a history in, words out.

Every answer is right, or one typed error; there is no error where a replica of every expert lived; every
fault is got over; the cluster holds afterwards what it held before, and nothing outlives it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from eaas.chaos.history import Asked, Census, History, Incident

__all__ = ["MEMORY_GROWTH", "check", "excused", "may_be_warm_up"]

MEMORY_GROWTH = 0.02
"""Share by which the memory of all processes may grow."""
# With fewer requests, more growth than the first share may be of a heap that has not settled; more than the
# second is not.
_ENOUGH_REQUESTS = 1500
_WARM_UP_GROWTH = (0.01, 0.07)
# Growth of all processes' memory by further requests, without faults, that a heap that settles may have: it
# grows in steps of some MiB. A leak of 20 KB a request makes twice as much of 1,500 requests.
_SETTLED_BYTES = 15 << 20
# The error of a request that found no replica of an expert.
_NO_REPLICA = "experts_unavailable"


def check(history: History) -> list[str]:
    """What went wrong, a line each; empty: nothing."""
    wrong = [*_requests(history), *_faults(history.incidents), *_resources(history)]
    return wrong + [f"left behind: {what}" for what in history.left_behind]


def may_be_warm_up(before: dict[str, Census], after: dict[str, Census], requests: int) -> bool:
    """Whether memory has grown, after too few requests to tell a leak from a heap that has not settled."""
    least, most = (1 + share for share in _WARM_UP_GROWTH)
    growth = _resident(after) / _resident(before)
    return requests < _ENOUGH_REQUESTS and least < growth <= most


def excused(asked: Asked, history: History) -> bool:
    """Whether experts may have had no replica at a time when the request was on its way.

    That is, where as many servers were lost at once as hold an expert: two.
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
            yield f"{name}: failed though a replica lived: {answer.error}"
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
        allowed = _resident(history.between) + _SETTLED_BYTES
        middle = f", {_mib(history.between)} MiB in between: it does not settle"
    if _resident(after) > allowed:
        yield f"resident memory: {_mib(after)} MiB, {_mib(before)} MiB before{middle}"


def _resident(census: dict[str, Census]) -> int:
    return sum(one.resident_bytes for one in census.values())


def _mib(census: dict[str, Census]) -> str:
    return f"{_resident(census) / 2**20:.1f}"
