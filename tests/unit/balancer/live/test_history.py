"""The history of decisions."""

import numpy as np
import pytest

from balancer.live.history import MOST_ENTRIES, History
from balancer.planner.candidates import Candidate
from eaas.rpc.v1 import balancer_pb2 as pb
from eaas.types import Placement

SERVERS = ("a", "b")


class Told:
    """A history with a fake clock, and its calls."""

    def __init__(self) -> None:
        self.now = 100.0
        self.entries: list[pb.HistoryEntry] = []
        self.wanted = 0
        self.history = History(self.entries.append, self._wants, lambda: self.now, lambda: 5e9)

    def _wants(self) -> None:
        self.wanted += 1

    def phases(self, placement: Placement, *phases: str) -> None:
        for phase in phases:
            self.history.phase(phase, placement)
            self.now += 2.0


def candidate() -> Candidate:
    holds_LSE = np.ones((1, 2, 3), bool)
    return Candidate(SERVERS, holds_LSE, holds_LSE / 2)


def placement(epoch: int, of: Candidate) -> Placement:
    return Placement(epoch, SERVERS, of.holds_LSE, of.shares_LSE.astype(np.float32))


def entry(trigger: str = "manual") -> pb.HistoryEntry:
    return pb.HistoryEntry(trigger=trigger, verdict=pb.VERDICT_MOVES, epoch_before=1)


def test_a_decision_is_followed_to_its_end_over_all_stages() -> None:
    told, stages = Told(), [candidate(), candidate()]
    told.history.decided(entry(), stages)
    for epoch, stage in zip((2, 3), stages, strict=True):
        told.phases(placement(epoch, stage), "prepare", "retire", "complete")
    (found,) = told.history.entries()
    assert (found.number, found.unix_ms) == (1, 5_000_000_000_000)
    assert (found.epoch, found.prepare_s, found.retire_s) == (3, 4.0, 4.0)
    assert [e.number for e in told.entries] == [1, 1], "when it was new, and when it was over"
    assert told.wanted == 2
    assert told.history.wanted is not None
    assert told.history.wanted.epoch == 3


def test_a_membership_change_ends_a_decision() -> None:
    told, mine, theirs = Told(), candidate(), candidate()
    told.history.decided(entry(), [mine])
    told.phases(placement(2, mine), "prepare")
    told.phases(placement(3, theirs), "prepare", "retire", "complete")
    newest, first = told.history.entries()
    assert first.given_up == "servers came, left or died meanwhile"
    assert not first.retire_s
    assert (newest.trigger, newest.epoch, newest.retire_s) == ("membership", 3, 2.0)
    assert "a, b" in newest.reason


def test_decisions_without_changes_are_recorded() -> None:
    told = Told()
    for _ in range(MOST_ENTRIES + 3):
        told.history.decided(entry("interval"))
    found = told.history.entries(2)
    assert [e.number for e in found] == [MOST_ENTRIES + 3, MOST_ENTRIES + 2]
    assert len(told.history.entries()) == MOST_ENTRIES
    found[0].reason = "changed"
    assert told.history.entries(1)[0].reason == "", "copies"


def test_a_placement_says_which_one_was_there_before() -> None:
    told = Told()
    told.phases(placement(1, candidate()), "prepare", "retire", "complete")
    told.phases(placement(2, candidate()), "prepare")  # overtaken
    told.phases(placement(3, candidate()), "prepare", "retire", "complete")
    epochs = [(e.epoch_before, e.epoch) for e in told.history.entries()]
    assert epochs == [(1, 3), (1, 2), (0, 1)]
    after = Told()
    after.history.restore(told.history.entries()[::-1])
    after.phases(placement(4, candidate()), "prepare")
    assert after.history.entries()[0].epoch_before == 3


@pytest.mark.parametrize("before", [0, 3])
def test_the_first_placement_of_the_next_balancer(before: int) -> None:
    told = Told()
    told.history.restore([pb.HistoryEntry(number=n + 1) for n in range(before)])
    told.phases(placement(1001, candidate()), "prepare")
    newest = told.history.entries()[0]
    assert (newest.trigger, newest.number) == ("recovery" if before else "membership", before + 1)
