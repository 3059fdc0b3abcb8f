"""`python -m benchmarks.monitor`: its frames, its arithmetic and its options."""

from __future__ import annotations

import itertools
import resource
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.monitor import http2, make_plan
from benchmarks.monitor.member import describe
from benchmarks.monitor.run import is_broken, watching_step
from benchmarks.monitor.stage import Stage
from benchmarks.monitor.watching import Sightings, Watcher
from eaas.errors import ConfigError
from eaas.rpc.v1 import monitor_pb2 as pb
from eaas.types import MemberState

FRAMES = st.lists(
    st.builds(
        http2.Frame,
        st.integers(0, 255),
        st.integers(0, 255),
        st.integers(0, http2.WINDOW),
        st.binary(max_size=70_000),
    ),
    max_size=5,
)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(ends)]


@given(FRAMES, st.lists(st.integers(0), max_size=6))
def test_frames_survive_any_split(frames: list[http2.Frame], places: list[int]) -> None:
    reader = http2.Frames()
    data = b"".join(http2.frame(*frame) for frame in frames)
    found = [frame for piece in cut(data, places) for frame in reader.feed(piece)]
    assert found == frames


@given(st.lists(st.binary(max_size=300), max_size=5), st.lists(st.integers(0), max_size=6))
def test_messages_survive_any_split(payloads: list[bytes], places: list[int]) -> None:
    reader = http2.Messages()
    data = b"".join(http2.message(payload) for payload in payloads)
    assert [m for piece in cut(data, places) for m in reader.feed(piece)] == payloads


def test_a_request_head_in_hpack() -> None:
    """RFC 7541, 6.1 and 6.2.2: two of the static table, then literals."""
    (frame,) = http2.Frames().feed(http2.request_head(5, "/s/M", "host:1"))
    assert (frame.kind, frame.stream, frame.flags) == (http2.HEADERS, 5, 4)
    assert frame.payload == (
        b"\x83\x86\x00\x05:path\x04/s/M\x00\x0a:authority\x06host:1"
        b"\x00\x02te\x08trailers\x00\x0ccontent-type\x10application/grpc"
    )
    with pytest.raises(ValueError, match="longer than 126 bytes"):
        http2.request_head(1, "/" + "x" * 126, "host:1")


def test_watchers_record_gaps_and_times_of_deaths() -> None:
    sightings = Sightings()
    one, other = Watcher(sightings, 4), Watcher(sightings)
    snapshot = pb.WatchResponse(snapshot=pb.Snapshot(revision=4, life=9)).SerializeToString()
    other.take(snapshot)
    assert (other.revision, other.life) == (4, 9)
    gone = describe(3).to_proto()
    gone.incarnation = 2
    gone.state = MemberState.DEAD.number
    death = pb.WatchResponse(event=pb.MemberEvent(revision=5, member=gone)).SerializeToString()
    one.take(death)
    assert len(sightings.of_death("client-3", 2)) == 1
    other.take(death)
    first, last = sightings.of_death("client-3", 2)
    assert first <= last
    assert sightings.of_death("client-3", 1) == []
    one.take(pb.WatchResponse(still_at_revision=5).SerializeToString())
    assert (sightings.gaps, sightings.signs, sightings.messages) == (0, 1, 4)
    assert sightings.bytes == len(snapshot) + 2 * len(death) + 2
    # The same again is out of turn.
    one.take(death)
    assert sightings.gaps == 1


CELL = {
    "cpu_cores": 0.2,
    "taken": 1.0,
    "ended": 0,
    "answer_ms": {"p50": 1.0, "p99": 9.0, "max": 20.0},
}


class _Stage:
    """A monitor that is behind from some moment on."""

    size_of_last = 10

    def __init__(self, ended: int, told: int) -> None:
        self.cell = CELL | {"ended": ended}
        self.told = told
        self.asked: list[str] = []

    def shares(self, count: int) -> list[int]:
        return [count]

    def watch(self, count: int) -> None:
        self.asked.append("watch")

    def measure(self) -> dict[str, Any]:
        return dict(self.cell)

    def ask_last(self, command: str, *words: object) -> dict[str, Any]:
        self.asked.append(command)
        return {"id": "m", "incarnation": 1, "at": 1.0}

    def ask_each(self, commands: list[Any]) -> list[dict[str, Any]]:
        return [{"count": self.told, "first": [1.5], "last": [2.0]}]


@pytest.mark.parametrize(
    ("ended", "told", "kinds", "asked"),
    [
        (0, 5, ["goodbye_ms", "death_ms"], ["watch"] + 6 * ["vanish", "revive"]),
        # Nobody waits for members that cannot come back.
        (0, 4, ["goodbye_ms"], ["watch", "vanish"]),
        (1, 5, [], ["watch"]),
    ],
)
def test_a_step_ends_when_the_monitor_is_behind(
    ended: int, told: int, kinds: list[str], asked: list[str]
) -> None:
    here = _Stage(ended, told)
    found = watching_step(plan(), here, 5)  # type: ignore[arg-type]
    assert [kind for kind in found if kind.endswith("_ms") and kind != "answer_ms"] == kinds
    assert here.asked == asked
    assert is_broken(found) == (len(kinds) < 2)


def plan(**words: Any) -> Any:
    usual = {"members": "30,10", "watchers": "5,20", "per_connection": 1, "loaders": 2}
    return make_plan(**(usual | {"seconds": 1.0} | words))


def test_a_plan_has_its_steps_in_order_and_all_members_watch_last() -> None:
    made = plan()
    assert made.members == (10, 30)
    assert made.watcher_steps(10) == (5, 10)
    assert made.watcher_steps(30) == (5, 20, 30)
    assert made.watcher_steps(5) == (5,)


def test_too_many_connections_are_refused_with_the_remedy() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pytest.raises(ConfigError, match=r"ulimit -Hn.*--per-connection"):
        plan(members=str(most))
    assert plan(members=str(most), per_connection=1000).members == (most,)


@given(st.data(), st.integers(1, 40), st.integers(1, 9))
def test_watchers_are_split_within_the_processes_members(
    data: st.DataObject, members: int, loaders: int
) -> None:
    loaders = min(loaders, members)
    child: Any = SimpleNamespace(address="host:1")
    here = Stage(child, [child] * loaders, child, plan(), members)
    sizes = here.shares(members)
    assert sum(sizes) == members
    assert sizes[-1] == here.size_of_last
    count = data.draw(st.integers(0, members))
    shares = here.shares(count)
    assert sum(shares) == count
    assert all(0 <= share <= size for share, size in zip(shares, sizes, strict=True))
    # As evenly as can be: a process that has fewer than its share has given all that it has.
    assert max(shares) - min(shares) <= 1
