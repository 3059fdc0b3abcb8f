"""The roll-out: servers' answers, errors, order of calls, and reused connections."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from balancer import channel_pool as lines
from balancer.channel_pool import ServerChannels
from balancer.planner.actions import Action, Call, Inspect, Prepare, Process
from balancer.rollout import Rollout
from eaas.membership.cluster_view import MembershipView
from eaas.net.grpc_server import Service, serve
from eaas.rpc.v1 import common_pb2, expert_pb2, expert_pb2_grpc
from eaas.types import Placement
from waiting import eventually

WAIT_S = 10.0


class Server:
    """A server with given experts."""

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
    """Wants each call once, and records the last outcome."""

    def __init__(self, address: str = "", has_time: bool = False) -> None:
        self.address = address
        self.call: Any = Inspect("s1", self.process("s1"), address, 2, 4)
        self.calls: list[Any] = []
        self.is_patient = has_time
        self.outcome: Any = None
        self.told = threading.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.noted = self.ticks = 0

    def process(self, name: str) -> Process:
        return (name, 1, "h", 1, self.address, 1)

    def loads(self, epoch: int, *names: str) -> list[Any]:
        """Calls to servers to load nothing."""
        nothing_LSE = np.zeros((1, len(names), 1), bool)
        placement = Placement(epoch, names, nothing_LSE, nothing_LSE.astype(np.float32))
        return [Prepare(name, self.process(name), self.address, placement) for name in names]

    def observe(self, members: Any, now: float) -> list[Action]:
        return self.calls or [self.call]

    def has_time(self, call: Call) -> bool:
        return self.is_patient

    def tick(self, now: float) -> list[Action]:
        self.ticks += 1
        return []

    def wake_at(self, now: float) -> float | None:
        return None

    def is_wanted(self, call: Call) -> bool:
        return call in self.calls

    def succeeded(self, call: Call, *told: Any) -> None:
        self.outcome = told
        self.noted += 1
        self.told.set()
        assert self.may_go_on.wait(WAIT_S)

    def failed(self, call: Call, now: float, *, timed_out: bool) -> list[Action]:
        self.outcome = "timed out" if timed_out else "failed"
        self.told.set()
        return []


@contextmanager
def rolling(
    server: Server, *, has_time: bool = False, load_timeout_s: float = WAIT_S
) -> Iterator[tuple[Planner, Rollout]]:
    """A planner and its roll-out, which talk to the server and do not break."""
    add = expert_pb2_grpc.add_ExpertServiceServicer_to_server
    face = serve([Service("eaas.rpc.v1.ExpertService", add, server)], "127.0.0.1", 0)
    planner, broken = Planner(face.address, has_time), []
    rollout = Rollout(planner, lambda placement: None, load_timeout_s, broken.append)  # type: ignore[arg-type]
    try:
        yield planner, rollout
    finally:
        rollout.close()
        face.stop(0)
    assert broken == []


def ask(server: Server) -> Any:
    """The outcome of an Inspect of a model with 2 layers of 4 experts."""
    with rolling(server) as (planner, rollout):
        rollout.observe(MembershipView(0, {}))
        assert planner.told.wait(WAIT_S)
    return planner.outcome


def test_a_servers_holds_and_epoch_are_reported() -> None:
    server = Server([0, 3], [1])
    holds_LE, epoch, digests_LE = ask(server)
    assert epoch == 7
    assert holds_LE.tolist() == [[True, False, False, True], [False, True, False, False]]
    assert not digests_LE.any(), "one of an older release states none"
    server.answer.layers[0].digests.extend([1 << 63, 5])
    _, _, digests_LE = ask(server)
    assert digests_LE.tolist() == [[1 << 63, 0, 0, 5], [0, 0, 0, 0]]
    server.answer.layers[0].digests.append(6)
    assert ask(server) == "failed"


@pytest.mark.parametrize("layers", [([0],), ([0], [1], [2]), ([0], [4])])
def test_an_answer_of_another_model_is_a_failure(layers: tuple[list[int], ...]) -> None:
    assert ask(Server(*layers)) == "failed"


def test_a_load_that_takes_too_long_is_told_as_that() -> None:
    """One time-out is enough: the planner must not wait as long again."""
    loading, over = threading.Event(), threading.Event()
    server = Server()
    server.PreparePlacement = lambda request, context: loading.set() or over.wait(WAIT_S)  # type: ignore[attr-defined]
    with rolling(server, load_timeout_s=0.3) as (planner, rollout):
        planner.calls = planner.loads(3, "s1")
        rollout.observe(MembershipView(0, {}))
        assert loading.wait(WAIT_S)
        assert planner.told.wait(WAIT_S)
        planner.calls = []
        over.set()
    assert planner.outcome == "timed out"


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


@pytest.mark.parametrize("has_time", [True, False])
def test_servers_are_told_in_turn_where_nobody_waits(has_time: bool) -> None:
    count, began_at, all_here = 3, list[float](), threading.Event()

    def prepare(request: Any, context: Any) -> Any:
        began_at.append(time.monotonic())
        if len(began_at) == count:
            all_here.set()
        # Where nobody rests all are told before the first has loaded anything.
        if not has_time:
            all_here.wait(WAIT_S)
        return expert_pb2.PreparePlacementResponse()

    server = Server()
    server.PreparePlacement = prepare  # type: ignore[attr-defined]
    with rolling(server, has_time=has_time) as (planner, rollout):
        planner.calls = planner.loads(3, *(f"s{i}" for i in range(count)))
        asked_at = time.monotonic()
        rollout.observe(MembershipView(0, {}))
        assert all_here.wait(WAIT_S)
    # The first may have been late; the last cannot have been early.
    if has_time:
        assert began_at[-1] - asked_at >= (count - 1) * 0.25


def test_one_tick_serves_all_answers_that_have_arrived() -> None:
    """A tick takes time for every server, so one for each of a thousand answers would take minutes."""
    with rolling(Server([0], [1])) as (planner, rollout):
        names = [f"s{n}" for n in range(40)]
        planner.calls = [Inspect(s, planner.process(s), planner.address, 2, 4) for s in names]
        planner.may_go_on.clear()
        rollout.observe(MembershipView(0, {}))
        assert planner.told.wait(WAIT_S)
        # The others arrive meanwhile.
        time.sleep(1.0)
        before = planner.ticks
        planner.may_go_on.set()
        eventually(lambda: planner.noted == 40, WAIT_S)
        assert planner.ticks - before < 20


class Channel:
    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(lines, "channel", lambda *_: Channel())
    return ServerChannels()


def test_a_call_that_runs_is_not_ended_by_the_failure_of_another(pool: Any) -> None:
    pooled = pool.acquire("a")
    assert pool.acquire("a") is pooled
    pool.release(pooled, works=False)
    assert not pooled.channel.closed
    other = pool.acquire("a")
    assert other is not pooled
    pool.release(pooled, works=False)
    assert pooled.channel.closed
    assert not other.channel.closed
    assert pool.acquire("a") is other


def test_lines_to_servers_that_are_gone_are_closed_once_no_call_runs(pool: Any) -> None:
    idle, busy, stays = pool.acquire("idle"), pool.acquire("busy"), pool.acquire("stays")
    pool.release(idle, works=True)
    pool.release(stays, works=True)
    pool.keep({"stays"})
    assert idle.channel.closed
    assert not busy.channel.closed
    pool.release(busy, works=True)
    assert busy.channel.closed
    assert not stays.channel.closed
