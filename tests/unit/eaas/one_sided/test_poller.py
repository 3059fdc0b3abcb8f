"""The poller: pauses and wake-ups."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaas.one_sided.poller import Poller, pause_us
from waiting import eventually


@given(st.integers(0, 10**9))
def test_pauses_are_at_most_an_eighth_of_the_idle_time(idle_us: int) -> None:
    assert pause_us(idle_us, 1000) <= min(idle_us / 8, 1000)


@given(st.integers(1_000, 10**9))
def test_pauses_after_idle_time(idle_us: int) -> None:
    assert pause_us(idle_us, 1000) >= 100


class Watched:
    def __init__(self) -> None:
        self.work = 0
        self.looks = 0
        self.pauses: list[int] = []
        self.lock = threading.Lock()
        self.poller = Poller("watched", self.poll, lambda: self.work > 0, 200_000, self.pause)

    def poll(self) -> bool:
        self.looks += 1
        return False

    def pause(self, pause_us: int) -> bool:
        self.pauses.append(pause_us)
        return False


@pytest.fixture
def watched() -> Iterator[Watched]:
    watched = Watched()
    yield watched
    watched.poller.close()
    assert "watched" not in [thread.name for thread in threading.enumerate()]


def test_no_polls_while_there_is_nothing_to_wait_for(watched: Watched) -> None:
    time.sleep(0.05)
    assert watched.looks == 0
    watched.work = 1
    watched.poller.wake()
    eventually(lambda: watched.looks)
    watched.work = 0
    eventually(lambda: len(watched.pauses) == watched.looks)
    looks = watched.looks
    time.sleep(0.05)
    assert watched.looks <= looks + 1  # One was under way.


def test_pauses_grow_until_a_wake(watched: Watched) -> None:
    watched.work = 1
    watched.poller.wake()
    eventually(lambda: 200_000 in watched.pauses)
    before = len(watched.pauses)
    watched.poller.wake()
    eventually(lambda: any(pause < 100_000 for pause in watched.pauses[before:]))
    watched.work = 0


def test_no_wake_is_lost(watched: Watched) -> None:
    for _ in range(300):
        watched.work = 1
        looks = watched.looks
        watched.poller.wake()
        eventually(lambda looks=looks: watched.looks > looks)
        watched.work = 0
