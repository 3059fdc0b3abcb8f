"""What servers answer, and what nobody expected."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from balancer.actions import Action, Call, Inspect, Prepare
from balancer.rollout import Rollout
from eaas.grpc_server import Service, serve
from eaas.membership import MembershipView
from eaas.rpc.v1 import common_pb2, expert_pb2, expert_pb2_grpc
from eaas.types import Placement

WAIT_S = 10.0


class Server:
    """Holds what a test says."""

    def __init__(self, *layers: list[int]) -> None:
        holdings = [common_pb2.Holding(experts=experts) for experts in layers]
        self.answer = expert_pb2.ListExpertsResponse(epoch=7, layers=holdings)

    def ListExperts(self, request: Any, context: Any) -> Any:
        return self.answer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return None


class Planner:
    """Asks one server once, and takes down what comes of it."""

    def __init__(self, address: str = "") -> None:
        self.call: Any = Inspect("s1", ("s1", 1, "h", 1, address, 1), address, 2, 4)
        self.outcome: Any = None
        self.told = threading.Event()

    def observe(self, members: Any, now: float) -> list[Action]:
        return [self.call]

    def tick(self, now: float) -> list[Action]:
        return []

    def wake_at(self, now: float) -> float | None:
        return None

    def is_wanted(self, call: Call) -> bool:
        return False

    def succeeded(self, call: Call, now: float, *told: Any) -> list[Action]:
        self.outcome = told
        self.told.set()
        return []

    def failed(self, call: Call, now: float, *, timed_out: bool) -> list[Action]:
        self.outcome = "timed out" if timed_out else "failed"
        self.told.set()
        return []


def ask(server: Server) -> Any:
    """The outcome of an Inspect of a model with 2 layers of 4 experts."""
    add = expert_pb2_grpc.add_ExpertServiceServicer_to_server
    face = serve([Service("eaas.rpc.v1.ExpertService", add, server)], "127.0.0.1", 0)
    planner, broken = Planner(face.address), []
    rollout = Rollout(planner, lambda placement: None, WAIT_S, broken.append)  # type: ignore[arg-type]
    try:
        rollout.observe(MembershipView(0, {}))
        assert planner.told.wait(WAIT_S)
    finally:
        rollout.close()
        face.stop(0)
    assert broken == []
    return planner.outcome


def test_what_a_server_holds_and_was_told() -> None:
    holds_LE, epoch = ask(Server([0, 3], [1]))
    assert epoch == 7
    assert holds_LE.tolist() == [[True, False, False, True], [False, True, False, False]]


@pytest.mark.parametrize("layers", [([0],), ([0], [1], [2]), ([0], [4])])
def test_an_answer_of_another_model_is_a_failure(layers: tuple[list[int], ...]) -> None:
    assert ask(Server(*layers)) == "failed"


def test_a_load_that_takes_too_long_is_told_as_that() -> None:
    """One time-out is enough: the planner is not to wait for as long again."""
    loading, over = threading.Event(), threading.Event()
    server = Server()
    server.PreparePlacement = lambda request, context: loading.set() or over.wait(WAIT_S)  # type: ignore[attr-defined]
    add = expert_pb2_grpc.add_ExpertServiceServicer_to_server
    face = serve([Service("eaas.rpc.v1.ExpertService", add, server)], "127.0.0.1", 0)
    planner, broken = Planner(face.address), []
    nothing = np.zeros((1, 1, 1), bool)
    placement = Placement(3, ("s1",), nothing, nothing.astype(np.float32))
    planner.call = Prepare("s1", planner.call.life, face.address, placement)
    rollout = Rollout(planner, lambda placement: None, 0.3, broken.append)  # type: ignore[arg-type]
    try:
        rollout.observe(MembershipView(0, {}))
        assert loading.wait(WAIT_S)
        assert planner.told.wait(WAIT_S)
    finally:
        over.set()
        rollout.close()
        face.stop(0)
    assert planner.outcome == "timed out"
    assert not broken


def test_an_error_that_nobody_expected_is_told() -> None:
    planner, told, broken = Planner(), threading.Event(), []

    def tick(now: float) -> list[Action]:
        raise ZeroDivisionError("a mistake")

    def on_broken(error: Exception) -> None:
        broken.append(error)
        told.set()

    planner.tick = tick  # type: ignore[method-assign]
    rollout = Rollout(planner, lambda placement: None, WAIT_S, on_broken)  # type: ignore[arg-type]
    assert told.wait(WAIT_S)
    rollout.close()
    assert [str(error) for error in broken] == ["a mistake"]
