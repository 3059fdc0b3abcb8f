"""Each member's own view of the cluster, folded from the monitor's Watch stream. No I/O, no clock."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from eaas.net.message_validation import check
from eaas.rpc.v1 import monitor_pb2 as pb
from eaas.types import Member, MemberState, ModelShape, Role

__all__ = ["MembershipFold", "MembershipView", "members_of"]

_MOST_MEMBERS = 1 << 16
# A member that this process itself marked DEAD is forgotten after this long, as no monitor will report it.
_FORGET_S = 600.0

RETURN_GRACE_S = 7.0
"""Seconds for members to register with a restarted monitor before they count as DEAD.

A member needs at most its stream's silence limit to notice, plus two backoffs of a second.
"""


@dataclass(frozen=True)
class MembershipView:
    """The cluster's members at one revision. It goes stale while the monitor is unreachable (`age_s`).

    Attributes:
        revision: The monitor's revision; comparable only within one incarnation of the monitor.
        members: By id; includes DEAD and LEFT members until the monitor forgets them.
        heard_at: Monotonic time of the monitor's last message, in seconds; -inf before the first.
    """

    revision: int = 0
    members: Mapping[str, Member] = field(default_factory=lambda: MappingProxyType({}))
    heard_at: float = -math.inf

    def age_s(self, now: float) -> float:
        """Seconds since the monitor's last message, inf before the first: members may have changed since."""
        return now - self.heard_at

    def live(self, role: Role) -> tuple[Member, ...]:
        """Return the members of a role that are neither DEAD nor LEFT (SUSPECT ones too), sorted by id."""
        found = (self.members[member_id] for member_id in sorted(self.members))
        return tuple(m for m in found if m.role is role and not m.state.is_gone)


class MembershipFold:
    """Folds the monitor's Watch stream into views of the members, across reconnects.

    A restarted monitor starts empty and learns its members as they register again. Members that have not
    registered yet keep their state for `RETURN_GRACE_S`.
    """

    def __init__(self) -> None:
        self.view = MembershipView()
        self._life = 0
        self._awaited: frozenset[str] = frozenset()
        self._awaited_until = -math.inf
        # Members unknown to the monitor, with the time at which this process forgets them.
        self._lost: dict[str, float] = {}

    @property
    def position(self) -> pb.WatchRequest:
        """The Watch request that continues the stream from the current view, for each new connection."""
        return pb.WatchRequest(
            from_revision=self.view.revision,
            life=self._life,
            knows_left=True,
            knows_models=True,
            knows_frontends=True,
        )

    def take(self, response: pb.WatchResponse, now: float) -> bool:
        """Fold in one message of the Watch stream; return whether the members changed (then `on_change`).

        Raises:
            ValueError: A field is out of range, a role or state is unknown, or there are too many members.
                The view stays unchanged.
        """
        check(response)
        kind = response.WhichOneof("kind")
        if kind not in ("snapshot", "event") and not (self._awaited or self._lost):
            self.view = replace(self.view, heard_at=now)
            return False
        members = dict(self.view.members)
        revision = self.view.revision
        if kind == "snapshot":
            members, revision = self._snapshot(response.snapshot, now), response.snapshot.revision
        elif kind == "event":
            member = Member.from_proto(response.event.member)
            if member.id not in members and len(members) >= _MOST_MEMBERS:
                raise ValueError(f"the monitor names more than {_MOST_MEMBERS} members")
            self._awaited -= {member.id}
            self._lost.pop(member.id, None)
            if response.event.forgotten:
                members.pop(member.id, None)
            else:
                members[member.id] = member
            revision = response.event.revision
        if self._awaited and now >= self._awaited_until:
            for member_id in self._awaited:
                members[member_id] = replace(members[member_id], state=MemberState.DEAD)
                self._lost[member_id] = now + _FORGET_S
            self._awaited = frozenset()
        for member_id in [name for name, until in self._lost.items() if now >= until]:
            del self._lost[member_id]
            members.pop(member_id, None)
        changed = members != self.view.members
        self.view = MembershipView(revision, MappingProxyType(members), now)
        return changed

    def _snapshot(self, snapshot: pb.Snapshot, now: float) -> dict[str, Member]:
        known = {member.id: member for member in members_of(snapshot)}
        missing = {
            member_id: member
            for member_id, member in self.view.members.items()
            if member_id not in known and not member.state.is_gone
        }
        self._lost.clear()
        if snapshot.life != self._life:
            self._life = snapshot.life
            self._awaited = frozenset(missing)
            self._awaited_until = now + RETURN_GRACE_S
        else:
            self._awaited &= frozenset(missing)
        # Members missing from the snapshot ended and were forgotten while the stream was down.
        kept = {}
        for member_id, member in missing.items():
            if member_id not in self._awaited:
                member = replace(member, state=MemberState.DEAD)
                self._lost[member_id] = now + _FORGET_S
            kept[member_id] = member
        return known | kept


def members_of(snapshot: pb.Snapshot) -> list[Member]:
    """Convert the members of a snapshot. Raises ValueError: an unknown role, state or model number."""
    models = [ModelShape.from_proto(message) for message in snapshot.models]
    return [Member.from_proto(message, models) for message in snapshot.members]
