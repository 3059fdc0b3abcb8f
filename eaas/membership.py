"""What a member knows of the others: the monitor's stream, folded into views. No I/O, no clock."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from eaas.rpc.v1 import monitor_pb2 as pb
from eaas.types import Member, MemberState, Role

__all__ = ["MembershipFold", "MembershipView"]

RETURN_GRACE_S = 7.0
"""Time for the members of a restarted monitor to register again before they count as DEAD.

A member needs at most its stream's silence limit or one reset to notice, plus two backoffs of a
second.
"""


@dataclass(frozen=True)
class MembershipView:
    """The members at one revision. It stays as it is while the monitor is away; `age_s` tells.

    Attributes:
        revision: The monitor's revision; those of different lives of the monitor do not compare.
        members: By id, DEAD ones included.
        heard_at: Monotonic seconds at which the monitor last spoke; -inf before the first time.
    """

    revision: int = 0
    members: Mapping[str, Member] = field(default_factory=lambda: MappingProxyType({}))
    heard_at: float = -math.inf

    def age_s(self, now: float) -> float:
        """Seconds since the monitor last spoke; inf before the first time."""
        return now - self.heard_at

    def live(self, role: Role) -> tuple[Member, ...]:
        """The members of a role that are not DEAD, by id."""
        found = (self.members[member_id] for member_id in sorted(self.members))
        return tuple(m for m in found if m.role is role and m.state is not MemberState.DEAD)


class MembershipFold:
    """Folds a Watch stream, over any number of reconnects, into one sequence of views.

    A restarted monitor starts empty and learns its members as they register again. Those that it
    does not know yet are kept as they were for `RETURN_GRACE_S`: nobody is taken for dead because
    the monitor was.
    """

    def __init__(self) -> None:
        self.view = MembershipView()
        self._life = 0
        self._awaited: frozenset[str] = frozenset()
        self._awaited_until = -math.inf

    @property
    def position(self) -> pb.WatchRequest:
        """The request that goes on where this fold is."""
        return pb.WatchRequest(from_revision=self.view.revision, life=self._life)

    def take(self, response: pb.WatchResponse, now: float) -> bool:
        """Folds one message in; returns whether the members changed.

        Raises:
            ValueError: A member's role or state is unknown (a newer monitor).
        """
        kind = response.WhichOneof("kind")
        if kind not in ("snapshot", "event") and not self._awaited:
            self.view = replace(self.view, heard_at=now)
            return False
        members = dict(self.view.members)
        revision = self.view.revision
        if kind == "snapshot":
            members, revision = self._snapshot(response.snapshot, now), response.snapshot.revision
        elif kind == "event":
            member = Member.from_proto(response.event.member)
            members[member.id] = member
            self._awaited -= {member.id}
            revision = response.event.revision
        if self._awaited and now >= self._awaited_until:
            for member_id in self._awaited:
                members[member_id] = replace(members[member_id], state=MemberState.DEAD)
            self._awaited = frozenset()
        changed = members != self.view.members
        self.view = MembershipView(revision, MappingProxyType(members), now)
        return changed

    def _snapshot(self, snapshot: pb.Snapshot, now: float) -> dict[str, Member]:
        told = {message.id: Member.from_proto(message) for message in snapshot.members}
        missing = {
            member_id: member
            for member_id, member in self.view.members.items()
            if member_id not in told and member.state is not MemberState.DEAD
        }
        if snapshot.life != self._life:
            self._life = snapshot.life
            self._awaited = frozenset(missing)
            self._awaited_until = now + RETURN_GRACE_S
        else:
            self._awaited &= frozenset(missing)
        return told | {member_id: missing[member_id] for member_id in self._awaited}
