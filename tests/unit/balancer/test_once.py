"""A call that comes again is answered as before; an id is one call's."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from balancer.once import Once, RequestIdTakenError
from eaas.rpc.v1 import balancer_pb2 as pb

KIND = pb.SetPolicyResponse


class Work:
    """Counts how often it was done."""

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


def test_the_same_call_has_one_effect_and_an_id_is_one_calls() -> None:
    once, work, told = Once(), Work(), []
    once._on_answered = lambda: told.append(1)
    assert [once.run(request("a"), KIND, work).policy for _ in range(3)] == ["1"] * 3
    assert told == [1]
    for other in (
        request("a", "craft"),
        pb.RebalanceRequest(request_id="a", policy="eplb"),
    ):
        with pytest.raises(RequestIdTakenError, match="'a' is another call's"):
            once.run(other, KIND, work)
    assert [once.run(request(""), KIND, work).policy for _ in range(2)] == ["2", "3"]


def test_what_failed_had_no_effect_and_may_come_again() -> None:
    once, work = Once(), Work()
    work.fails = True
    with pytest.raises(ValueError, match="no"):
        once.run(request("a"), KIND, work)
    work.fails = False
    assert once.run(request("a"), KIND, work).policy == "2"


def test_calls_at_the_same_time_wait_for_the_first() -> None:
    once, work = Once(), Work()
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
    once, work = Once(kept=2), Work()
    for name in "abc":
        once.run(request(name), KIND, work)
    assert [a.request_id for a in once.answered()] == ["b", "c"]
    again = Once(kept=2)
    again.restore(once.answered())
    assert again.run(request("c"), KIND, work).policy == "3"
    assert again.run(request("a"), KIND, work).policy == "4"
