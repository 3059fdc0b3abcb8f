"""The balancer's record: size limit, restoring, unreadable records."""

from __future__ import annotations

from typing import Any

import numpy as np

from balancer.live.history import History
from balancer.persistence.idempotency import Answered, IdempotencyCache
from balancer.persistence.snapshot import BalancerSnapshot
from balancer.persistence.write_ahead import fitted
from balancer.planner.layout import Layout, Settings
from eaas.rpc.v1 import balancer_pb2 as pb
from eaas.types import Placement


class Side:
    """A balancer's state, and its planner's calls."""

    def __init__(self) -> None:
        self.layout = Layout(Settings(policy="eplb"))
        self.history, self.once = History(), IdempotencyCache()
        self.memory = BalancerSnapshot(self.layout, self.history, self.once)
        self.remembered: list[Placement] = []

    def remember(self, wanted: Placement) -> None:
        self.remembered.append(wanted)

    def ask(self, question: Any) -> Any:
        return question(self)


def wanted() -> Placement:
    holds_LSE = np.ones((2, 2, 3), bool)
    return Placement(7, ("a", "b"), holds_LSE, np.full(holds_LSE.shape, 0.5, np.float32))


def test_there_and_back() -> None:
    one, other = Side(), Side()
    one.layout.change(policy="scalpel", knobs={"budget": 3, "drift_tol": 0.5})
    one.layout.change(pins=frozenset({(1, 2, "a"), (0, 0, "b")}))
    one.history.decided(pb.HistoryEntry(reason="why"))
    one.history.phase("prepare", wanted())
    one.once.restore([Answered("id", b"digest", b"answer")])
    other.memory.restore(one.memory.record().SerializeToString(), other.ask)
    assert other.layout.settings == one.layout.settings
    assert other.layout.settings.knobs == {"budget": 3, "drift_tol": 0.5}
    assert [e.reason for e in other.history.entries()][-1] == "why"
    assert other.once.answered() == one.once.answered()
    (found,) = other.remembered
    assert found.epoch == 7
    assert np.allclose(found.shares_LSE, 0.5)


def test_what_is_configured_is_not_left_to_the_next_one() -> None:
    """Its operator may have configured something else."""
    one, other = Side(), Side()
    other.layout.change(policy="craft")
    other.memory.restore(one.memory.record().SerializeToString(), other.ask)
    assert other.layout.settings.policy == "craft"
    assert other.remembered == []


def test_a_record_that_cannot_be_read_is_passed_over() -> None:
    side = Side()
    before = side.layout.settings
    odd = pb.BalancerRecord(policy="of the future", pins=[pb.Pin(server_id="a")])
    for data in (b"", b"\xff\xff", odd.SerializeToString()):
        side.memory.restore(data, side.ask)
        assert side.layout.settings == before
        assert side.remembered == []


def test_the_oldest_answers_go_first_then_the_oldest_history() -> None:
    def record() -> pb.BalancerRecord:
        return pb.BalancerRecord(
            wanted=wanted().to_proto(),
            history=[pb.HistoryEntry(number=n, reason="x" * 100) for n in range(50)],
            answered=[pb.AnsweredRequest(request_id=f"{n}", answer=b"x" * 100) for n in range(50)],
        )

    assert fitted(record(), 1 << 20) == record()
    some = fitted(record(), 8000)
    assert len(some.history) == 50
    assert 0 < len(some.answered) < 50
    assert some.answered[-1].request_id == "49"
    few = fitted(record(), 1000)
    assert not few.answered
    assert few.history[-1].number == 49
    assert few.wanted == record().wanted
    assert few.ByteSize() <= 1000
