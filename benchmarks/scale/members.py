"""Simulated members and watchers of a monitor, thousands of them: `python -m benchmarks.scale.members JSON`.

On the wire a simulated member acts like `MemberSession`: Register, a Heartbeat stream with a message per
interval (sent once the last was answered), and a Watch stream, all on a connection of its own. It describes
itself as a server or a client of a model with 48 layers.

Commands of the process, one line of JSON each, answered when done:

    join                                seconds
    watch    [count, revision, life]    null; so many members watch from now on
    fetch    count                      null; so many watchers connect, take a snapshot, and begin anew
    figures                             what has happened since the last time
"""

from __future__ import annotations

import json
import resource
import selectors
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.scale.http2 import Call, Line, message
from eaas.launcher_pipe import announce, bind_to_launcher
from eaas.log import configure_logging
from eaas.membership.session import PROTOCOL_VERSION
from eaas.rpc.v1 import monitor_pb2 as pb
from eaas.types import Member, MemberState, ModelShape, Role

__all__ = ["SimulatedMembers", "SnapshotReaders", "main"]

# Model that members send when they register; a realistic one, of 48 layers.
_SHAPE = ModelShape(
    model_type="qwen3_moe",
    num_experts=128,
    hidden_size=2048,
    top_k=8,
    layer_names=tuple(f"model.layers.{layer}.mlp.experts" for layer in range(48)),
    dtype="bfloat16",
    digest="0" * 64,
)
# Largest number of concurrent registrations.
_JOINING = 32
_TICK_S = 0.002


class _SimulatedMember:
    """One member and its connection.

    Attributes:
        sent_at: Monotonic seconds of the last heartbeat.
        waits: Whether that heartbeat is unanswered.
        overdue: Whether the next heartbeat became due before that answer.
        revision: The last that its Watch stream told.
    """

    __slots__ = ("_beat", "_beats", "line", "number", "overdue", "revision", "sent_at", "waits")

    def __init__(self, number: int, line: Line) -> None:
        self.number = number
        self.line = line
        self._beats = 0
        self._beat = b""
        self.sent_at = 0.0
        self.waits = self.overdue = False
        self.revision = -1

    def register(self, registered: Callable[[], None], ended: Callable[[], None]) -> None:
        """Register at the monitor; every second number is an expert server."""
        server = self.number % 2 == 0
        member = Member(
            id=f"{'server' if server else 'client'}-{self.number}",
            role=Role.EXPERT_SERVER if server else Role.ATTENTION_CLIENT,
            pid=1 + self.number,
            host="simulated",
            address=f"192.0.2.1:{10_000 + self.number}",
            state=MemberState.SERVING,
            model=_SHAPE,
            transports=("shm", "grpc") if server else (),
        )

        def answered(data: bytes) -> None:
            heartbeat = pb.HeartbeatRequest(
                id=member.id,
                incarnation=pb.RegisterResponse.FromString(data).incarnation,
                state=member.state.number,
                progress=1_000_000,
                experts=member.experts,
                epoch=member.epoch,
            )
            self._beat = heartbeat.SerializeToString()
            registered()

        request = pb.RegisterRequest(member=member.to_proto(), protocol_version=PROTOCOL_VERSION)
        self.line.call("Register", request.SerializeToString(), Call(answered, ended))

    def beat(self, now: float, call: Call) -> None:
        """Send a heartbeat to the monitor; the first one opens the stream, with the callbacks `call`."""
        self.sent_at, self.waits, self.overdue = now, True, False
        if self._beats:
            self.line.send(self._beats, message(self._beat))
        else:
            self._beats = self.line.call("Heartbeat", self._beat, call, more=True)


class SimulatedMembers:
    """Members that each send a heartbeat every `interval_s`, once the last one is answered. One thread.

    What the selector reports as ready is called: its data is a function.
    """

    def __init__(
        self,
        address: str,
        numbers: Sequence[int],
        interval_s: float,
        selector: selectors.BaseSelector,
    ) -> None:
        self._selector = selector
        self._interval_s = interval_s
        self._members = [_SimulatedMember(number, Line(address)) for number in numbers]
        for member in self._members:
            selector.register(member.line, selectors.EVENT_READ, partial(self._ready, member.line))
        self._dirty = {member.line for member in self._members}
        self._to_join: deque[_SimulatedMember] = deque()
        self._joining = 0
        # Next heartbeats, ordered by time because all members have the same interval.
        self._due: deque[tuple[float, _SimulatedMember]] = deque()
        self._delays_us: list[int] = []
        self._count: Counter[str] = Counter()
        # The last message of a Watch stream, parsed once, because all watchers get the same bytes.
        self._last, self._parsed = b"", pb.WatchResponse()

    def join(self) -> None:
        """Begin to register all members at the monitor; their heartbeats follow."""
        self._to_join.extend(self._members)

    @property
    def joined(self) -> bool:
        """Whether all members are registered."""
        return not self._to_join and not self._joining

    def watch(self, count: int, revision: int, life: int) -> None:
        """Make the first `count` members watch the membership from a revision."""
        position = pb.WatchRequest(from_revision=revision, life=life, heartbeats_tell=True)
        for member in self._members[:count]:
            member.revision = revision
            told = partial(self._told, member)
            member.line.call("Watch", position.SerializeToString(), Call(told, self._ended))
            self._dirty.add(member.line)

    def take_figures(self) -> dict[str, Any]:
        """Return the counters since the last call, and reset them.

        Heartbeats: `sent`, `late` (turns before the last answer) and `delays_us` of the answers. `ended`:
        streams that the monitor ended. Messages of Watch streams: `watched`; `gaps` of them out of turn.
        """
        names = ("sent", "late", "ended", "watched", "gaps")
        found = {name: self._count[name] for name in names} | {"delays_us": self._delays_us}
        self._count.clear()
        self._delays_us = []
        return found

    def turn(self, now: float) -> float:
        """Send due registrations and heartbeats; return the seconds until the next turn."""
        while self._to_join and self._joining < _JOINING:
            self._joining += 1
            member = self._to_join.popleft()
            member.register(partial(self._registered, member), self._join_ended)
            self._dirty.add(member.line)
        while self._due and self._due[0][0] <= now:
            due_at, member = self._due.popleft()
            if member.waits:
                self._count["late"] += 1
                member.overdue = True
            else:
                self._beat(member, due_at)
        self._flush()
        wait_s = self._due[0][0] - now if self._due else self._interval_s
        return max(_TICK_S, wait_s)

    def close(self) -> None:
        """Close all connections to the monitor."""
        for member in self._members:
            self._selector.unregister(member.line)
            member.line.close()

    def _ready(self, line: Line) -> None:
        line.pump()
        self._dirty.add(line)

    def _beat(self, member: _SimulatedMember, due_at: float) -> None:
        member.beat(time.monotonic(), Call(lambda _: self._answered(member), self._ended))
        self._count["sent"] += 1
        self._due.append((due_at + self._interval_s, member))
        self._dirty.add(member.line)

    def _registered(self, member: _SimulatedMember) -> None:
        self._beat(member, time.monotonic())

    def _answered(self, member: _SimulatedMember) -> None:
        now = time.monotonic()
        self._delays_us.append(round(1e6 * (now - member.sent_at)))
        member.waits = False
        if member.overdue:
            self._beat(member, now)

    def _told(self, member: _SimulatedMember, data: bytes) -> None:
        self._count["watched"] += 1
        if data != self._last:
            self._last, self._parsed = data, pb.WatchResponse.FromString(data)
        kind = self._parsed.WhichOneof("kind")
        if kind == "event":
            self._count["gaps"] += self._parsed.event.revision != member.revision + 1
            member.revision = self._parsed.event.revision
        elif kind == "snapshot":
            member.revision = self._parsed.snapshot.revision

    def _join_ended(self) -> None:
        self._joining -= 1

    def _ended(self) -> None:
        self._count["ended"] += 1

    def _flush(self) -> None:
        for line in self._dirty:
            line.flush()
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.unsent else 0)
            key = self._selector.get_key(line)
            if key.events != wanted:
                self._selector.modify(line, wanted, key.data)
        self._dirty.clear()


class SnapshotReaders:
    """Watchers that connect, take a snapshot, and connect anew, again and again."""

    def __init__(self, address: str, selector: selectors.BaseSelector) -> None:
        self._address = address
        self._selector = selector
        self._lines: set[Line] = set()
        self._snapshots = self._bytes = 0

    def fetch(self, count: int) -> None:
        """Let this many watchers fetch snapshots from now on, in place of those before."""
        for line in tuple(self._lines):
            self._close(line)
        for _ in range(count):
            self._open()

    def take_figures(self) -> dict[str, int]:
        """Return the number and the bytes of the snapshots since the last call, and reset them."""
        found = {"snapshots": self._snapshots, "snapshot_bytes": self._bytes}
        self._snapshots = self._bytes = 0
        return found

    def _open(self) -> None:
        line = Line(self._address)
        self._lines.add(line)
        request = pb.WatchRequest(knows_left=True, knows_models=True, heartbeats_tell=True)
        sizes: list[int] = []

        # Only the size is used, because parsing would cost more processor time than the monitor's work.
        def answered(data: bytes) -> None:
            sizes.append(len(data))

        def ready() -> None:
            # A command that the selector reported with it may have closed it.
            if line not in self._lines:
                return
            line.pump()
            line.flush()
            if sizes:
                self._snapshots += sizes[0] > 0
                self._bytes += sizes[0]
                self._close(line)
                self._open()

        refused = partial(sizes.append, 0)
        line.call("Watch", request.SerializeToString(), Call(answered, refused))
        line.flush()
        self._selector.register(line, selectors.EVENT_READ, ready)

    def _close(self, line: Line) -> None:
        self._selector.unregister(line)
        line.close()
        self._lines.discard(line)


def main(arguments: str) -> None:
    """Simulate members until the launcher closes `control`."""
    bind_to_launcher()
    configure_logging("bench-members")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    wanted: dict[str, Any] = json.loads(arguments)
    with socket.socket(socket.AF_UNIX) as control, selectors.DefaultSelector() as selector:
        control.connect("\0" + wanted["control"])
        members = SimulatedMembers(
            wanted["address"], range(*wanted["numbers"]), wanted["interval_s"], selector
        )
        readers = SnapshotReaders(wanted["address"], selector)
        selector.register(control, selectors.EVENT_READ, None)
        announce(ready=wanted["address"])
        began = time.monotonic()
        is_joining = False
        while True:
            wait_s = members.turn(time.monotonic())
            for key, _ in selector.select(min(wait_s, 0.02)):
                if key.data is not None:
                    key.data()
                    continue
                # The launcher waits for each answer, so there is one command.
                command = control.recv(65_536)
                if not command:
                    return
                name, *words = json.loads(command)
                answer: Any = None
                if name == "join":
                    members.join()
                    began, is_joining = time.monotonic(), True
                    continue
                if name == "watch":
                    members.watch(*words)
                elif name == "fetch":
                    readers.fetch(*words)
                else:
                    answer = members.take_figures() | readers.take_figures()
                control.sendall(json.dumps(answer).encode() + b"\n")
            if is_joining and members.joined:
                is_joining = False
                control.sendall(json.dumps(time.monotonic() - began).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1])
