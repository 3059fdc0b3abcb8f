"""What the watchers of one process have seen, and when."""

from __future__ import annotations

import time
from collections import defaultdict

from eaas.rpc.v1 import common_pb2
from eaas.rpc.v1 import monitor_pb2 as pb

__all__ = ["Sightings", "Watcher"]

_Key = tuple[str, int]


class Sightings:
    """When each death was seen, by all watchers of this process together.

    Attributes:
        messages: That came.
        bytes: Of those.
        signs: How many of the messages only said that nothing changed.
        gaps: Events that came out of turn: 0, or the monitor is wrong.
    """

    def __init__(self) -> None:
        self.messages = self.bytes = self.signs = self.gaps = 0
        self._deaths: dict[_Key, list[float]] = defaultdict(list)
        # All watchers are sent the same: it is read once.
        self._last = b""
        self._read = pb.WatchResponse()

    def read(self, data: bytes) -> pb.WatchResponse:
        """The message of these bytes."""
        self.messages += 1
        self.bytes += len(data)
        if data != self._last:
            self._last, self._read = data, pb.WatchResponse.FromString(data)
        return self._read

    def saw(self, event: pb.MemberEvent) -> None:
        """A watcher was told of this."""
        if event.member.state == common_pb2.MEMBER_STATE_DEAD:
            self._deaths[event.member.id, event.member.incarnation].append(time.monotonic())

    def of_death(self, member_id: str, incarnation: int) -> list[float]:
        """When each watcher that knows by now learned of a death, in order (monotonic seconds)."""
        return self._deaths.get((member_id, incarnation), [])


class Watcher:
    """One watch stream.

    Args:
        sightings: Of this process.

    Attributes:
        revision: Up to which it knows everything; -1 before the first message.
        life: Of the monitor; 0 where it was not told.
    """

    def __init__(self, sightings: Sightings, revision: int = -1) -> None:
        self._sightings = sightings
        self.revision = revision
        self.life = 0

    def take(self, data: bytes) -> None:
        """A message came."""
        response = self._sightings.read(data)
        kind = response.WhichOneof("kind")
        if kind == "event":
            if response.event.revision != self.revision + 1:
                self._sightings.gaps += 1
            self.revision = response.event.revision
            self._sightings.saw(response.event)
        elif kind == "snapshot":
            self.revision, self.life = response.snapshot.revision, response.snapshot.life
        else:
            self._sightings.signs += 1
