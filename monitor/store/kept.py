"""What survives a monitor, and what a store does with it.

Terms:
  life: names one history of membership. Positions in it (revisions) stay good for as long as its store does,
    over restarts and over changes of the leader.
  kept: the last event of every member, tombstones included. No leases: monotonic clocks do not survive.
  change: what is new since the last write. A store takes it whole or not at all, as far as a reader can tell.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Protocol

from eaas.rpc.v1 import monitor_pb2 as pb
from eaas.types import Member, MemberState, Role
from monitor.life import MemberEvent

__all__ = [
    "Change",
    "Kept",
    "Store",
    "StoreLostError",
    "event_from_bytes",
    "event_to_bytes",
    "new_life",
]


class StoreLostError(Exception):
    """The store takes nothing (any more): the disk is full, or another monitor leads now.

    Whoever wrote knows less than the store from now on, and has to stop serving.
    """


def new_life() -> int:
    """A name for a new history; 0 is nobody's."""
    return secrets.randbits(62) | 1


@dataclass(frozen=True)
class Kept:
    """What a store holds.

    Attributes:
        life: Names the history.
        revision: Of the last event.
        forgotten_incarnation: The highest among the tombstones that are no longer kept.
        events: The last event of each member, oldest first.
        records: What members left to whoever comes after them, by id, serialized (`Records`).
    """

    life: int
    revision: int = 0
    forgotten_incarnation: int = 0
    events: tuple[MemberEvent, ...] = ()
    records: tuple[tuple[str, bytes], ...] = ()

    def without_monitors(self) -> Kept:
        """The same, with every monitor DEAD: the one that reads this is its successor."""
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
    """What is to be written.

    Attributes:
        revision: The new one.
        forgotten_incarnation: The new one.
        events: The last event of each member that changed, oldest first.
        removed: Ids of tombstones that are no longer kept.
        records: Those that are new, by id.
    """

    revision: int
    forgotten_incarnation: int = 0
    events: tuple[MemberEvent, ...] = ()
    removed: tuple[str, ...] = ()
    records: tuple[tuple[str, bytes], ...] = ()


class Store(Protocol):
    """What survives its monitor. One thread at a time uses it; `leads_until` may be read by any."""

    @property
    def kept(self) -> Kept:
        """What it held when it was opened."""

    @property
    def leads_until(self) -> float:
        """Monotonic seconds until which nobody else writes to it, as far as is known now."""

    def write(self, change: Change) -> None:
        """Returns when the change survives the end of this process. Raises StoreLostError."""

    def close(self) -> None:
        """Gives it free for another one."""


def event_to_bytes(event: MemberEvent) -> bytes:
    """The contract's message of an event, without what changes all the time."""
    member = replace(event.member, progress=0, in_flight=0, silence_s=0.0)
    message = pb.MemberEvent(revision=event.revision, member=member.to_proto(), reason=event.reason)
    return message.SerializeToString()


def event_from_bytes(data: bytes) -> MemberEvent:
    """The event of a message. Raises ValueError or protobuf's DecodeError for anything else."""
    message = pb.MemberEvent.FromString(data)
    return MemberEvent(message.revision, Member.from_proto(message.member), message.reason)
