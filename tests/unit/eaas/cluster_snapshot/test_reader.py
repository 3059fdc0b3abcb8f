"""How often the reader requests a plan for the bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from eaas.cluster_snapshot import reader as reader_module
from eaas.cluster_snapshot.counters import Counters
from eaas.cluster_snapshot.reader import SnapshotReader
from eaas.rpc.v1 import balancer_pb2 as pb
from eaas.types import Member, MemberState, Role

BALANCER = Member("balancer", Role.BALANCER, 7, "here", "here:1", MemberState.SERVING)


class Stub:
    """A balancer that decides something before each look, and takes long to plan."""

    def __init__(self, clock: SimpleNamespace, plan_s: float) -> None:
        self._clock, self._plan_s = clock, plan_s
        self.decided = 0
        self.planned_at: list[float] = []

    def GetHotness(self, _request: Any, timeout: float) -> pb.GetHotnessResponse:
        return pb.GetHotnessResponse(steps=1, step_s=1.0)

    def History(self, _request: Any, timeout: float) -> pb.HistoryResponse:
        self.decided += 1
        return pb.HistoryResponse(entries=[pb.HistoryEntry(number=self.decided)])

    def GetPlacement(self, _request: Any, timeout: float) -> pb.GetPlacementResponse:
        return pb.GetPlacementResponse()

    def Plan(self, _request: Any, timeout: float) -> pb.PlanResponse:
        self.planned_at.append(self._clock.now)
        self._clock.now += self._plan_s
        return pb.PlanResponse(bound=1.0)


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], Stub]]:
    """Looks once a second for so long that ten plans fit in; returns the balancer that was asked."""
    readers = []

    def look(plan_s: float) -> Stub:
        clock = SimpleNamespace(now=1000.0)
        monkeypatch.setattr(reader_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
        stub = Stub(clock, plan_s)
        reader = SnapshotReader(lambda _s: [BALANCER], lambda _s: Counters())
        readers.append(reader)
        monkeypatch.setattr(reader, "_stub", lambda _address: stub)
        while clock.now < 1000 + 1000 * plan_s:
            reader.look()
            clock.now += 1
        return stub

    yield look
    for reader in readers:
        reader.close()


def test_plans_take_at_most_a_hundredth_of_the_time(
    look: Callable[[float], Stub],
) -> None:
    stub = look(0.5)
    assert stub.decided > 400
    assert 4 <= len(stub.planned_at) <= 10
    pauses = [b - a for a, b in zip(stub.planned_at, stub.planned_at[1:], strict=False)]
    assert min(pauses) >= 50


def test_a_fast_plan_follows_each_decision(look: Callable[[float], Stub]) -> None:
    stub = look(0.01)
    assert len(stub.planned_at) >= 4
