"""Snapshots of all members for new watchers: built in parts, one at a time, shared by all who wait.

The loop that builds a snapshot also receives the heartbeats. A snapshot of ten thousand members takes longer
than the loop may be held, so the loop gets its turn between two parts.

    capture            revision, and each member as it is now: immutable objects, no copies
    part, part, ...    some members each, as bytes; heartbeats and events go on in between
    models             each once, at the end; members refer to them by number
    join               one message: protobuf merges the parts of a repeated field, and those of a submessage

A watcher gets the events after the snapshot's revision next, so changes during the build are not lost. Only
a member's counters are as new as its part, because they have no revision.
"""

from __future__ import annotations

import asyncio
import functools
import math
import threading
import time
from collections import defaultdict
from dataclasses import dataclass

from eaas.rpc.v1 import common_pb2
from eaas.rpc.v1 import monitor_pb2 as pb
from eaas.types import Member, MemberState, ModelShape, Role
from eaas.wire.protobuf import bytes_tag, varint
from monitor.incarnation import MemberEntry
from monitor.registry import Registry

__all__ = ["Knows", "Snapshots", "message_of"]

# A snapshot is shared for the longer of this time after its capture and this many times that of its build.
_SHARED_S = 0.05
_SHARED_BUILDS = 4.0

_MODEL_TAG = bytes_tag(common_pb2.Member.MODEL_FIELD_NUMBER)
_MODELS_TAG = bytes_tag(pb.Snapshot.MODELS_FIELD_NUMBER)
_MEMBER_TAG = bytes_tag(pb.Snapshot.MEMBERS_FIELD_NUMBER)
_SNAPSHOT_TAG = bytes_tag(pb.WatchResponse.SNAPSHOT_FIELD_NUMBER)


@dataclass(frozen=True)
class Knows:
    """What a watcher understands; watchers of earlier releases lack some of it.

    Attributes:
        left: See `WatchRequest.knows_left`.
        models: See `WatchRequest.knows_models`.
        frontends: See `WatchRequest.knows_frontends`.
    """

    left: bool = True
    models: bool = True
    frontends: bool = True

    @classmethod
    def of(cls, request: pb.WatchRequest) -> Knows:
        """Read from a Watch request what its watcher understands."""
        return cls(request.knows_left, request.knows_models, request.knows_frontends)

    def lists(self, member: Member) -> bool:
        """Whether the watcher gets this member."""
        return self.frontends or member.role is not Role.FRONTEND


@dataclass(frozen=True)
class _Snapshot:
    """A serialized snapshot, with the times for which it is shared (monotonic seconds)."""

    revision: int = -1
    captured_at: float = -math.inf
    shared_until: float = -math.inf
    message: bytes = b""


class Snapshots:
    """Builds and shares the snapshots of a registry. Its coroutines run in one loop.

    Args:
        registry: Captured with `lock` held. Only the loop changes its members' counters.
        lock: Held for a moment at each capture, never during an `await`.
        life: Incarnation of the monitor (`Snapshot.life`).
        part: Members that are serialized in one turn of the loop, which takes some milliseconds.
    """

    def __init__(
        self, registry: Registry, lock: threading.RLock, life: int, part: int = 200
    ) -> None:
        self._part = part
        self._registry = registry
        self._lock = lock
        self._life = life
        # The last snapshot for watchers that know the same.
        self._last: defaultdict[Knows, _Snapshot] = defaultdict(_Snapshot)
        # It goes on when the watcher that began it is cancelled, because others wait for it too.
        self._building: asyncio.Task[None] | None = None

    async def take(self, knows: Knows) -> tuple[int, bytes]:
        """Return a snapshot's revision and message; no event before this call is missing in it.

        Args:
            knows: What the watcher understands.
        """
        asked_at, asked_revision = time.monotonic(), self._registry.revision
        while True:
            last = self._last[knows]
            # Captured since the call; or nothing changed before the call, and its counters are new enough.
            if last.captured_at >= asked_at or (
                last.revision == asked_revision and last.shared_until >= asked_at
            ):
                return last.revision, last.message
            if self._building is None:
                self._building = asyncio.create_task(self._build(knows))
            await asyncio.shield(self._building)

    async def _build(self, knows: Knows) -> None:
        try:
            self._last[knows] = await self._built(knows)
        finally:
            self._building = None

    async def _built(self, knows: Knows) -> _Snapshot:
        # Numbers of the models, from 1; None: each member has its own.
        numbers: dict[ModelShape, int] | None = {} if knows.models else None
        began = time.monotonic()
        with self._lock:
            revision = self._registry.revision
            captured, entries = self._registry.capture()
        parts = [_part(pb.Snapshot(revision=revision, life=self._life).SerializeToString())]
        for start in range(0, len(captured), self._part):
            if start:
                await asyncio.sleep(0)
            now, turn = time.monotonic(), slice(start, start + self._part)
            members = (
                _member_bytes(member, entry, now, knows, numbers)
                for member, entry in zip(captured[turn], entries[turn], strict=True)
                if knows.lists(member)
            )
            parts.append(_part(b"".join(members)))
        parts.append(_part(b"".join(_model_bytes(shape, _MODELS_TAG) for shape in numbers or ())))
        shared_s = max(_SHARED_S, _SHARED_BUILDS * (time.monotonic() - began))
        return _Snapshot(revision, began, began + shared_s, b"".join(parts))


def _part(snapshot: bytes) -> bytes:
    """Wrap some fields of a Snapshot as a WatchResponse, which merges with those before it."""
    return _SNAPSHOT_TAG + varint(len(snapshot)) + snapshot


def _member_bytes(
    member: Member,
    entry: MemberEntry,
    now: float,
    knows: Knows,
    numbers: dict[ModelShape, int] | None,
) -> bytes:
    """Serialize a captured member as a field of a Snapshot, with the current counters of its entry."""
    model, number = b"", 0
    if member.model is not None:
        if numbers is None:
            model = _model_bytes(member.model, _MODEL_TAG)
        else:
            number = numbers.setdefault(member.model, len(numbers) + 1)
    counters = entry.counters(now - entry.arrivals.heard_at)
    message = message_of(
        member, knows, model=None, model_number=number, **counters
    ).SerializeToString()
    return b"".join((_MEMBER_TAG, varint(len(message) + len(model)), message, model))


# All members of a cluster serve one model, which is nine tenths of a member's bytes.
@functools.lru_cache(maxsize=8)
def _model_bytes(shape: ModelShape, tag: bytes) -> bytes:
    """Serialize a model as the last field of a member, or as a field of a Snapshot."""
    model = shape.to_proto().SerializeToString()
    return tag + varint(len(model)) + model


def message_of(member: Member, knows: Knows, **changes: object) -> common_pb2.Member:
    """Convert a member to its message, with other values for some fields.

    For watchers of earlier releases LEFT becomes DEAD, and a frontend a dead attention client.
    """
    message = member.to_proto(**changes)
    if not knows.lists(member):
        message.role = common_pb2.ROLE_ATTENTION_CLIENT
        message.state = common_pb2.MEMBER_STATE_DEAD
    if member.state is MemberState.LEFT and not knows.left:
        message.state = common_pb2.MEMBER_STATE_DEAD
    return message
