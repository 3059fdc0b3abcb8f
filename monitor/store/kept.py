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

from eaas.log import get_logger
from eaas.message_check import check
from eaas.message_ranges import MOST_EPOCH
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


_log = get_logger(__name__)
_MOST_REVISION = 2**63 - 1


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

    Raises ValueError for numbers that no history has.

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
        """The same, with every monitor gone: the one that reads this is its successor."""
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
    left = member.state is MemberState.LEFT
    if left:
        # A monitor of an earlier release may be the next one to read it.
        member = replace(member, state=MemberState.DEAD)
    message = pb.MemberEvent(
        revision=event.revision, member=member.to_proto(), reason=event.reason, left=left
    )
    return message.SerializeToString()


def event_from_bytes(data: bytes) -> MemberEvent | None:
    """The event of a message; None where a field is out of its range, which is logged.

    Monitors of earlier releases took any number and any id. A member that still lives registers again.

    Raises:
        ValueError: A role or a state is unknown.
        DecodeError: It is no message.
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
    return MemberEvent(message.revision, member, message.reason)
