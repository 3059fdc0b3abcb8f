"""A monitor whose thread fails ends with a reason: silence would look like a healthy cluster."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from kazoo.protocol.states import KazooState

from eaas.config import MonitorConfig
from monitor.main import Monitor
from monitor.store import StoreLostError
from monitor.store import candidate as module
from monitor.store.candidate import Candidate

PATIENCE_S = 30.0


class Callback:
    """A callback that the test can wait for."""

    def __init__(self) -> None:
        self._called = threading.Event()
        self.what: list[str] = []

    def __call__(self, what: str) -> None:
        self.what.append(what)
        self._called.set()

    def wait(self) -> None:
        assert self._called.wait(PATIENCE_S)


def test_a_failing_tick_ends_the_monitor() -> None:
    def tick() -> None:
        raise TypeError("a bug")

    told = Callback()
    monitor = Monitor(MonitorConfig(port=0), told, on_tick=tick)
    try:
        told.wait()
    finally:
        monitor.stop()
    assert told.what == ["the monitor failed: TypeError('a bug')"]


class Session:
    """A client of ZooKeeper that is connected at once."""

    state = KazooState.CONNECTED

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.closed = threading.Event()
        sessions.append(self)

    def start_async(self) -> threading.Event:
        connected = threading.Event()
        connected.set()
        return connected

    def close(self) -> None:
        self.closed.set()

    add_listener = remove_listener = stop = lambda *_: None


sessions: list[Session] = []


@pytest.mark.parametrize("failing", ["the turn", "what follows"])
def test_a_failed_election_gives_up_its_place_in_the_queue(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions.clear()
    told = Callback()

    def turn(*_: Any) -> None:
        raise TypeError("a bug") if failing == "the turn" else StoreLostError("the session ended")

    def follow(_leader: str | None) -> None:
        if failing == "what follows":
            raise TimeoutError

    monkeypatch.setattr(module, "KazooClient", Session)
    monkeypatch.setattr(Candidate, "_run_session", turn)
    calls = SimpleNamespace(lead=lambda *_: None, follow=follow, fail=told)
    candidate = Candidate("z:1", "/eaas", 1.0, "a:1", **vars(calls))
    told.wait()
    (session,) = sessions
    assert session.closed.is_set()
    (why,) = told.what
    assert why.startswith("the election failed: T")
    candidate.close()
