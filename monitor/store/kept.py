"""What the monitor stores, so that the membership survives its process; and the interface of stores.

Terms:
  life: identifier of one history of membership. Its revisions stay valid as long as the store exists, across
    restarts and changes of the leader.
  kept: the last event of every member, tombstones included. Leases are not kept, because monotonic clocks do
    not survive.
  change: everything that is new since the last write. Stores write it atomically.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Protocol

from eaas.log import get_logger
from eaas.net.message_ranges import MOST_EPOCH
from eaas.net.message_validation import check
from eaas.rpc.v1 import common_pb2
from eaas.rpc.v1 import monitor_pb2 as pb
from eaas.types import Member, MemberState, Role
from monitor.incarnation import MemberEvent

__all__ = [
    "Change",
    "Kept",
    "Store",
    "StoreLostError",
    "event_from_bytes",
    "event_to_bytes",
    "new_life",
]


_log = get_logger(__name__)
_MOST_REVISION = 2**63 - 1


class StoreLostError(Exception):
    """The store fails permanently, because the disk is full or another monitor leads now.

    The writer's state is behind the store's from then on, so it must stop serving.
    """


def new_life() -> int:
    """Make a random id of a new history of membership, never 0; watchers of another one get a snapshot."""
    return secrets.randbits(62) | 1


@dataclass(frozen=True)
class Kept:
    """A store's content: the membership at one revision.

    Raises ValueError for numbers out of range.

    Attributes:
        life: Identifier of the history.
        revision: Revision of the last event.
        forgotten_incarnation: The highest incarnation of all forgotten tombstones.
        events: The last event of each member, oldest first.
        records: Members' records for their successors, by id, serialized (`Records`).
    """

    life: int
    revision: int = 0
    forgotten_incarnation: int = 0
    events: tuple[MemberEvent, ...] = ()
    records: tuple[tuple[str, bytes], ...] = ()

    def __post_init__(self) -> None:
        for name, most in (
            ("life", _MOST_REVISION),
            ("revision", _MOST_REVISION),
            ("forgotten_incarnation", MOST_EPOCH),
        ):
            number = getattr(self, name)
            if not isinstance(number, int) or not 0 <= number <= most:
                raise ValueError(f"its {name} is {number!r}: it can be 0 to {most}")

    def without_monitors(self) -> Kept:
        """Copy the content with every monitor DEAD, because the reading monitor is their successor."""
        return replace(
            self,
            events=tuple(
                replace(event, member=replace(event.member, state=MemberState.DEAD))
                if event.member.role is Role.MONITOR
                else event
                for event in self.events
            ),
        )


@dataclass(frozen=True)
class Change:
    """One write to the store: everything that changed since the last write.

    Attributes:
        revision: The new revision.
        forgotten_incarnation: The new value.
        events: The last event of each member that changed, oldest first.
        removed: Ids of forgotten tombstones.
        records: New records, by id.
    """

    revision: int
    forgotten_incarnation: int = 0
    events: tuple[MemberEvent, ...] = ()
    removed: tuple[str, ...] = ()
    records: tuple[tuple[str, bytes], ...] = ()


class Store(Protocol):
    """The monitor's persistent state. Used by one thread at a time; any thread may read `leads_until`."""

    @property
    def kept(self) -> Kept:
        """The content when the store was opened, from which the leading monitor starts."""

    @property
    def leads_until(self) -> float:
        """Monotonic seconds until which no other monitor can write; calls are refused from then on."""

    def write(self, change: Change) -> None:
        """Write a change to the store; returns when it survives this process. Raises StoreLostError."""

    def close(self) -> None:
        """Release the store for another monitor."""


def event_to_bytes(event: MemberEvent) -> bytes:
    """Serialize a membership event for the store, without the counters that change all the time."""
    member = replace(
        event.member, progress=0, in_flight=0, silence_s=0.0, loading_bytes=0, loaded_bytes=0
    )
    message = pb.MemberEvent(
        revision=event.revision,
        member=member.to_proto(),
        reason=event.reason,
        left=member.state is MemberState.LEFT,
        frontend=member.role is Role.FRONTEND,
    )
    # A monitor of an earlier release may read it.
    if message.left:
        message.member.state = common_pb2.MEMBER_STATE_DEAD
    if message.frontend:
        message.member.role = common_pb2.ROLE_ATTENTION_CLIENT
    return message.SerializeToString()


def event_from_bytes(data: bytes) -> MemberEvent | None:
    """Parse a stored membership event; None if a field is out of range, which is logged.

    Monitors of earlier releases accepted any number and any id. Such a member registers again if it is alive.

    Raises:
        ValueError: A role or a state is unknown.
        DecodeError: The message is malformed.
    """
    message = pb.MemberEvent.FromString(data)
    try:
        check(message)
    except ValueError as error:
        _log.warning("a stored member is ignored: %s", error)
        return None
    member = Member.from_proto(message.member)
    if message.left:
        member = replace(member, state=MemberState.LEFT)
    if message.frontend:
        member = replace(member, role=Role.FRONTEND)
    return MemberEvent(message.revision, member, message.reason)
