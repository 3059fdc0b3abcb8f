"""The checker: what is right passes, and each thing that is wrong is found, alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from eaas_cli.bench.load import Asked
from eaas_cli.bench.stream import Answer
from eaas_cli.chaos.check import check, excused, may_be_warm_up, settled
from eaas_cli.chaos.history import Census, History, Incident

GONE = "experts_unavailable"
RIGHT = Answer(10.0, 12.0, "a b c", 3, (10.5, 11.0, 12.0))
FAILED = replace(RIGHT, text="a b", error="layer 1: no live replica of expert 2", error_type=GONE)
PAIR = Incident("pair", "expert-server-0, expert-server-1", 11.0, 13.0, 14.0)
KILL = replace(PAIR, kind="kill", target="expert-server-0")
HELD = {"monitor": Census(1, 100 << 20, 20, 0), "expert-server-0": Census(2, 100 << 20, 14, 1)}


def history(*answers: Answer | None, **changes: object) -> History:
    asked = tuple(Asked(0, 10.0, answer) for answer in answers or (RIGHT,))
    return replace(History(2, asked, ("a b c",), (KILL,), HELD, HELD, ()), **changes)


def held(name: str, **changes: int) -> dict[str, Census]:
    return HELD | {name: replace(HELD[name], **changes)}


@pytest.mark.parametrize(
    "right",
    [
        history(RIGHT, RIGHT),
        history(FAILED, incidents=(PAIR,)),
        history(after=held("monitor", resident_bytes=103 << 20)),
        history(after=held("monitor", resident_bytes=10 << 20)),
    ],
)
def test_a_correct_history_has_no_violation(right: History) -> None:
    assert check(right) == []


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (history(None), "no end"),
        (history(replace(RIGHT, text="a b d")), "wrong answer"),
        (history(replace(RIGHT, text="a b")), "wrong answer"),
        (history(replace(RIGHT, text="", error="ReadError()")), "without a type"),
        (history(FAILED), "although a replica was alive"),
        (
            history(
                replace(FAILED, error_type="service_unavailable"),
                incidents=(replace(KILL, kind="client-kill", target="attention-client-1"),),
            ),
            "although a replica was alive",
        ),
        (
            history(replace(FAILED, error_type="internal_error"), incidents=(PAIR,)),
            "replica was alive",
        ),
        (history(replace(FAILED, text="a x"), incidents=(PAIR,)), "wrong text"),
        (history(incidents=(replace(KILL, failure="it did not start"),)), "it did not start"),
        (history(incidents=(replace(KILL, whole_s=math.inf),)), "not whole again"),
        (history(after={"monitor": HELD["monitor"]}), "processes: monitor"),
        (history(after=held("monitor", descriptors=21)), "21 descriptors, 20 before"),
        (history(after=held("monitor", descriptors=19)), "19 descriptors, 20 before"),
        (history(after=held("expert-server-0", segments=2)), "2 segments, 1 before"),
        (history(after=held("monitor", resident_bytes=105 << 20)), "resident memory"),
        (history(left_behind=("process 7",)), "left behind: process 7"),
    ],
)
def test_a_violation_is_found(wrong: History, word: str) -> None:
    (found,) = check(wrong)
    assert word in found


def test_an_error_is_excused_only_while_two_servers_are_lost() -> None:
    asked = Asked(0, 10.0, FAILED)
    assert excused(asked, history(incidents=(KILL, PAIR)))
    assert not excused(asked, history(incidents=(KILL,)))
    assert not excused(asked, history(incidents=(replace(PAIR, began_s=12.1),)))
    past = replace(PAIR, began_s=5.0, mended_s=6.0, whole_s=9.9)
    assert not excused(asked, history(incidents=(past,)))
    assert not excused(asked, history(incidents=(PAIR,), redundancy=3))


def grown(mib: int) -> dict[str, Census]:
    return held("monitor", resident_bytes=HELD["monitor"].resident_bytes + (mib << 20))


@pytest.mark.parametrize(
    ("mib", "requests", "doubtful"),
    [
        *((1, 360, False), (4, 360, True), (12, 360, True), (20, 360, False)),
        *((4, 1500, False), (5, 1500, True), (8, 1500, True), (9, 1500, False)),
    ],
)
def test_growth_may_be_warm_up(mib: int, requests: int, doubtful: bool) -> None:
    """Growth of 200 MiB by so many; by very much, or much in a long run, it is no warm-up."""
    assert may_be_warm_up(HELD, grown(mib), requests) == doubtful


@pytest.mark.parametrize(("mib", "found"), [(5, False), (8, True)])
def test_after_a_long_run_the_heap_has_settled(mib: int, found: bool) -> None:
    long_run = history(*[RIGHT] * 3000, after=grown(5 + mib))
    assert bool(check(replace(long_run, between=grown(5)))) == found


@pytest.mark.parametrize(
    ("leak_mib", "settles_mib", "phases", "violations"),
    [
        # A heap that is warm, one that warms up, and two that leak: 20 KB a request, and far more.
        (0.0, (0, 0), 1, 0),
        (0.0, (8, 7), 2, 0),
        (20 / 1024, (2, 5), 2, 1),
        (0.2, (0, 0), 1, 1),
    ],
)
def test_more_requests_tell_a_leak_from_a_heap_that_warms_up(
    leak_mib: float, settles_mib: tuple[float, float], phases: int, violations: int
) -> None:
    def after(requests: int, settled_mib: float) -> dict[str, Census]:
        return {"client": Census(1, int((350 + leak_mib * requests + settled_mib) * 2**20), 20, 8)}

    faulted = history(*[RIGHT] * 360, before=after(0, 0), after=after(360, settles_mib[0]))
    more = history(*[RIGHT] * 1440).asked
    found = settled(faulted, lambda: (more, after(1800, sum(settles_mib))))
    assert len(found.asked) == (360, 1800)[phases - 1]
    assert len(check(found)) == violations
