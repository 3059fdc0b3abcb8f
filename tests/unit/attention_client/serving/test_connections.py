"""Which connection makes room for another one."""

import pytest

from attention_client.serving.network import connections as module
from attention_client.serving.network.connections import Connections


class Connection:
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
    limit, slow, quick = Connections(2), Connection(), Connection()
    for connection in (slow, quick):
        limit.add(connection)
        limit.reads(connection)
        now[0] += 0.3
    assert not limit.all_busy
    limit.reads(slow)  # Another piece of its request: it does not get younger.
    assert limit.make_room()
    assert slow.evicted
    limit.add(Connection())
    assert limit.all_busy
    assert not limit.make_room()
    assert not quick.evicted
    now[0] += 0.5
    assert limit.make_room()
    assert quick.evicted


def test_idle_connections_go_first(now: list[float]) -> None:
    limit, incomplete, busy, idle = Connections(3), Connection(), Connection(), Connection()
    for connection in (incomplete, busy, idle):
        limit.add(connection)
        limit.reads(connection)
    limit.answers(busy)
    limit.answers(idle)
    limit.idles(idle)
    now[0] += 1.0
    assert limit.make_room()
    assert (idle.evicted, incomplete.evicted, busy.evicted) == (True, False, False)
