"""Records the membership events that one process's watchers receive from the monitor, and their times."""

from __future__ import annotations

import time
from collections import defaultdict

from eaas.rpc.v1 import common_pb2
from eaas.rpc.v1 import monitor_pb2 as pb

__all__ = ["Sightings", "Watcher"]

_Key = tuple[str, int]


class Sightings:
    """Times at which this process's watchers saw each death, and counters of their messages.

    Attributes:
        signs: Messages without a change.
        gaps: Events out of order; always 0 with a correct monitor.
    """

    def __init__(self) -> None:
        self.messages = self.bytes = self.signs = self.gaps = 0
        self._deaths: dict[_Key, list[float]] = defaultdict(list)
        # The last message, parsed once, because all watchers get the same bytes.
        self._last = b""
        self._read = pb.WatchResponse()

    def read(self, data: bytes) -> pb.WatchResponse:
        """Count and parse a message of a watch stream."""
        self.messages += 1
        self.bytes += len(data)
        if data != self._last:
            self._last, self._read = data, pb.WatchResponse.FromString(data)
        return self._read

    def saw(self, event: pb.MemberEvent) -> None:
        """Record the time of a membership event if it is a death."""
        if event.member.state == common_pb2.MEMBER_STATE_DEAD:
            self._deaths[event.member.id, event.member.incarnation].append(time.monotonic())

    def of_death(self, member_id: str, incarnation: int) -> list[float]:
        """Times at which watchers saw a member's death, in order (monotonic seconds)."""
        return self._deaths.get((member_id, incarnation), [])


class Watcher:
    """The receiving end of one member's watch stream.

    Args:
        sightings: Record of this process.

    Attributes:
        revision: Last received revision; -1 before the first message.
        life: Incarnation of the monitor; 0 if unknown.
    """

    def __init__(self, sightings: Sightings, revision: int = -1) -> None:
        self._sightings = sightings
        self.revision = revision
        self.life = 0

    def take(self, data: bytes) -> None:
        """Process one message of the watch stream: an event, a snapshot or a liveness sign."""
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
