"""Which connection makes room for another one."""

import pytest

from frontend.network import connections as module
from frontend.network.connections import Connection, Connections, State


class Evictable(Connection):
    def __init__(self) -> None:
        self.evicted = False

    def evict(self) -> None:
        self.evicted = True


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    return clock


def test_a_request_has_time_to_arrive(now: list[float]) -> None:
    limit, slow, quick = Connections(2), Evictable(), Evictable()
    for connection in (slow, quick):
        limit.enter(connection, State.READING)
        now[0] += 0.3
    limit.enter(slow, State.READING)  # Another piece of its request: it does not get younger.
    assert limit.make_room()
    assert slow.evicted
    limit.enter(Evictable(), State.READING)
    assert not limit.make_room()
    assert not quick.evicted
    now[0] += 0.5
    assert limit.make_room()
    assert quick.evicted


def test_idle_connections_go_first(now: list[float]) -> None:
    limit, incomplete, busy, idle = Connections(3), Evictable(), Evictable(), Evictable()
    for connection in (incomplete, busy, idle):
        limit.enter(connection, State.READING)
    limit.enter(busy, State.BUSY)
    limit.enter(idle, State.BUSY)
    limit.enter(idle, State.IDLE)
    now[0] += 1.0
    assert limit.make_room()
    assert (idle.evicted, incomplete.evicted, busy.evicted) == (True, False, False)


def test_refused_connections_take_no_room_and_are_few(now: list[float]) -> None:
    limit, refused = Connections(1), [Evictable() for _ in range(20)]
    for connection in refused:
        limit.enter(connection, State.REFUSED)
    assert limit.make_room()
    assert [connection.evicted for connection in refused] == [True] * 4 + [False] * 16
