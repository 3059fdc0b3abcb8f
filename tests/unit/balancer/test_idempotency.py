"""A repeated call gets the same answer; an id belongs to one call."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from balancer.persistence.idempotency import IdempotencyCache, RequestIdTakenError
from eaas.rpc.v1 import balancer_pb2 as pb

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
