"""Two agents in one process: order of bytes and notes, errors, disconnection."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import pytest

from eaas.errors import ConnectionLostError
from eaas.one_sided import Agent, Region, why_not
from waiting import eventually

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "there")
LARGE = 4 << 20


class End:
    def __init__(self, name: str) -> None:
        self.agent: Agent[int] = Agent(name)
        self.memory = mmap.mmap(-1, LARGE)
        self.region: Region = self.agent.register(self.memory, [(0, LARGE)])
        self.ended: list[tuple[int, str]] = []
        self.came: list[tuple[str, bytes]] = []

    def meet(self, other: End) -> None:
        assert self.agent.learn(other.agent.handle()) == other.agent.name
        assert self.agent.learn(other.region.description) == other.agent.name
        self.agent.connect(other.agent.name)

    def look(self) -> None:
        self.ended += self.agent.written()
        self.came += self.agent.notes()


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    left, right = End("left"), End("right")
    left.meet(right)
    right.meet(left)
    yield left, right
    left.agent.close()
    right.agent.close()


@pytest.mark.parametrize("length", [1, 128, 4096, 65_536, LARGE])
def test_the_note_arrives_after_the_bytes(ends: tuple[End, End], length: int) -> None:
    left, right = ends
    for turn in range(1, 6):
        left.memory[:length] = bytes([turn]) * length
        left.agent.write("right", left.region.address, right.region.address, length, turn, b"n")
        before = len(right.came)
        while len(right.came) == before:
            left.look()
            right.look()
        assert right.memory[:length] == bytes([turn]) * length
        assert right.came[-1] == ("left", b"n")
        eventually(lambda turn=turn: left.look() or (turn, "") in left.ended)
    assert not left.agent.sending()


def test_a_note_alone(ends: tuple[End, End]) -> None:
    left, right = ends
    left.agent.note("right", b"\x00\xff")
    eventually(lambda: left.look() or right.look() or right.came == [("left", b"\x00\xff")])


def test_an_address_outside_a_region_is_refused(ends: tuple[End, End]) -> None:
    left, right = ends
    start = right.region.address
    for source, target in ((left.region.address, start + LARGE - 1), (start - LARGE - 9, start)):
        with pytest.raises(ConnectionLostError):
            left.agent.write("right", source, target, 2, 0)
    with pytest.raises(ConnectionLostError):
        left.agent.write("stranger", left.region.address, start, 2, 0)
    assert not left.agent.sending()


def test_parts_of_a_buffer_are_written_and_what_is_between_them_is_not(
    ends: tuple[End, End],
) -> None:
    left, right = ends
    memory = mmap.mmap(-1, 16384)
    parts = right.agent.register(memory, [(1000, 2000), (6000, 16384)])
    assert left.agent.learn(parts.description) == "right"
    left.memory[:1000] = bytes([7]) * 1000
    for start in (1000, 6000):
        target = parts.address + start - 1000
        left.agent.write("right", left.region.address, target, 1000, start, b"n")
        eventually(lambda start=start: right.look() or left.look() or (start, "") in left.ended)
        assert memory[start : start + 1000] == bytes([7]) * 1000
        with pytest.raises(ConnectionLostError):
            left.agent.write("right", left.region.address, target - 8, 1000, 0)
    with pytest.raises(ConnectionLostError):
        left.agent.write("right", left.region.address, parts.address, 1001, 0)
    assert not any(memory[2000:6000])


def test_a_forgotten_peer_is_unknown(ends: tuple[End, End]) -> None:
    left, right = ends
    left.agent.forget("right")
    left.agent.forget("right")
    with pytest.raises(ConnectionLostError):
        left.agent.write("right", left.region.address, right.region.address, 8, 0)
    with pytest.raises(ConnectionLostError):
        left.agent.note("right", b"n")


def test_a_closed_agent_returns_nothing(ends: tuple[End, End]) -> None:
    left, _ = ends
    left.agent.close()
    left.agent.close()
    assert left.agent.notes() == left.agent.written() == []
    with pytest.raises(ConnectionLostError, match="closed"):
        left.agent.note("right", b"n")


def test_an_invalid_handle(ends: tuple[End, End]) -> None:
    with pytest.raises(ConnectionLostError, match="handle"):
        ends[0].agent.learn(b"nothing")
