"""The balancer's record, and answers to repeated calls."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from balancer.live.history import History
from balancer.persistence.idempotency import Answered, IdempotencyCache, RequestIdTakenError
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


KIND = pb.SetPolicyResponse


class Work:
    """Counts its calls."""

    def __init__(self) -> None:
        self.done = 0
        self.fails = False
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def __call__(self) -> pb.SetPolicyResponse:
        self.begun.set()
        assert self.go_on.wait(10)
        self.done += 1
        if self.fails:
            raise ValueError("no")
        return pb.SetPolicyResponse(policy=f"{self.done}")


def request(request_id: str, policy: str = "eplb") -> pb.SetPolicyRequest:
    return pb.SetPolicyRequest(request_id=request_id, policy=policy)


def test_a_repeated_call_has_one_effect() -> None:
    told: list[int] = []
    once, work = IdempotencyCache(on_answered=lambda: told.append(1)), Work()
    assert [once.run(request("a"), KIND, work).policy for _ in range(3)] == ["1"] * 3
    assert told == [1]
    for other in (
        request("a", "craft"),
        pb.RebalanceRequest(request_id="a", policy="eplb"),
    ):
        with pytest.raises(RequestIdTakenError, match="'a' is another call's"):
            once.run(other, KIND, work)
    assert [once.run(request(""), KIND, work).policy for _ in range(2)] == ["2", "3"]


def test_a_failed_call_can_be_repeated() -> None:
    once, work = IdempotencyCache(), Work()
    work.fails = True
    with pytest.raises(ValueError, match="no"):
        once.run(request("a"), KIND, work)
    work.fails = False
    assert once.run(request("a"), KIND, work).policy == "2"


def test_calls_at_the_same_time_wait_for_the_first() -> None:
    once, work = IdempotencyCache(), Work()
    work.go_on.clear()
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(once.run, request("a"), KIND, work) for _ in range(8)]
        assert work.begun.wait(10)
        with pytest.raises(RequestIdTakenError):
            once.run(request("a", "craft"), KIND, work)
        work.go_on.set()
        assert {call.result(10).policy for call in calls} == {"1"}
    assert work.done == 1


def test_the_oldest_answers_are_forgotten_and_the_others_restored() -> None:
    once, work = IdempotencyCache(capacity=2), Work()
    for name in "abc":
        once.run(request(name), KIND, work)
    assert [a.request_id for a in once.answered()] == ["b", "c"]
    again = IdempotencyCache(capacity=2)
    again.restore(once.answered())
    assert again.run(request("c"), KIND, work).policy == "3"
    assert again.run(request("a"), KIND, work).policy == "4"
