"""What the balancer does next: a state machine without I/O (views and outcomes in, actions out).

The life of a placement:

  enough servers            every placed server
  of one model    +-------+ has applied it       +-----------+   a server comes back, or a new one
  --------------->| draft |--------------------->| published |---> joins: Apply (its share, or none)
                  +-------+  Publish             +-----------+
                      | a placed server dies first: wait for enough again, next epoch
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from balancer.policies import spread
from eaas.types import Member, MemberState, Placement, Role

__all__ = ["Action", "Apply", "Planner", "Publish", "Refuse"]

_PLACEABLE = (MemberState.JOINING, MemberState.SERVING)


@dataclass(frozen=True)
class Apply:
    """Tell a server to hold its share.

    Attributes:
        server_id: The server.
        incarnation: The life of it that is meant.
        address: host:port of its control face.
        placement: Whose share of that server is to be held; none where it is not placed.
    """

    server_id: str
    incarnation: int
    address: str
    placement: Placement


@dataclass(frozen=True)
class Publish:
    """Tell the clients to use the placement."""

    placement: Placement


@dataclass(frozen=True)
class Refuse:
    """Leave a server without work, and say why."""

    server_id: str
    reason: str


Action = Apply | Publish | Refuse


class Planner:
    """Makes the first placement once enough servers are there, and keeps servers in line with it.

    Args:
        expected_servers: Expert servers to wait for.
        redundancy: Servers that hold each expert.

    Raises:
        ValueError: redundancy is above expected_servers.
    """

    def __init__(self, expected_servers: int, redundancy: int) -> None:
        if redundancy > expected_servers:
            raise ValueError(
                f"redundancy {redundancy} is above expected_servers {expected_servers}"
            )
        self._expected = expected_servers
        self._redundancy = redundancy
        self._placement: Placement | None = None
        self._published = False
        self._digest = ""
        self._last_epoch = 0
        self._servers: dict[str, Member] = {}
        # By server: the life and the epoch that it was asked to apply, and that it has applied.
        self._asked: dict[str, tuple[int, int]] = {}
        self._applied: dict[str, tuple[int, int]] = {}
        self._refused: set[tuple[str, int]] = set()

    def observe(self, members: Mapping[str, Member]) -> list[Action]:
        """The membership changed."""
        self._servers = {m.id: m for m in members.values() if m.role is Role.EXPERT_SERVER}
        alive = {
            server_id for server_id, m in self._servers.items() if m.state is not MemberState.DEAD
        }
        self._asked = {
            server_id: key for server_id, key in self._asked.items() if server_id in alive
        }
        if (
            self._placement
            and not self._published
            and not alive.issuperset(self._placement.servers)
        ):
            self._placement = None
        actions: list[Action] = []
        if self._placement is None:
            actions += self._draft()
        else:
            actions += self._refuse_other_models(self._digest)
        return actions + self._apply_where_due() + self._publish_if_complete()

    def applied(self, apply: Apply) -> list[Action]:
        """The server holds what it was told."""
        self._applied[apply.server_id] = (apply.incarnation, apply.placement.epoch)
        return self._publish_if_complete()

    def is_wanted(self, apply: Apply) -> bool:
        """Whether a failed attempt is worth another one: the server lives and the plan stands."""
        key = (apply.incarnation, apply.placement.epoch)
        return self._placement is apply.placement and self._asked.get(apply.server_id) == key

    def _draft(self) -> list[Action]:
        placeable = {
            server_id: m
            for server_id, m in sorted(self._servers.items())
            if m.state in _PLACEABLE and m.model is not None
        }
        digests = Counter(m.model.digest for m in placeable.values() if m.model)
        if not digests:
            return []
        # Among equals the digest of the first server by id.
        digest, count = digests.most_common(1)[0]
        actions = self._refuse_other_models(digest)
        if count < self._expected:
            return actions
        servers = {server_id: m for server_id, m in placeable.items() if _digest(m) == digest}
        shape = next(iter(servers.values())).model
        assert shape is not None
        holds_LSE, shares_LSE = spread(
            shape.num_layers, shape.num_experts, len(servers), self._redundancy
        )
        # Servers may hold a placement of a balancer before this one: they refuse an epoch that is
        # not above it.
        self._last_epoch = 1 + max(self._last_epoch, *(m.epoch for m in self._servers.values()))
        self._digest = digest
        self._placement = Placement(self._last_epoch, tuple(servers), holds_LSE, shares_LSE)
        return actions

    def _refuse_other_models(self, digest: str) -> list[Action]:
        actions: list[Action] = []
        for server in self._servers.values():
            life = (server.id, server.incarnation)
            if server.state not in _PLACEABLE or _digest(server) == digest or life in self._refused:
                continue
            self._refused.add(life)
            what = f"model {_digest(server)[:12]}" if server.model else "no model"
            actions.append(Refuse(server.id, f"it serves {what}, the cluster serves {digest[:12]}"))
        return actions

    def _apply_where_due(self) -> list[Action]:
        placement = self._placement
        if placement is None:
            return []
        actions: list[Action] = []
        for server_id, server in sorted(self._servers.items()):
            key = (server.incarnation, placement.epoch)
            if server.state not in _PLACEABLE or _digest(server) != self._digest:
                continue
            if server.state is MemberState.SERVING and server.epoch == placement.epoch:
                # Its monitor's silence ended its lease, not its weights.
                self._applied[server_id] = key
            elif self._asked.get(server_id) != key:
                self._asked[server_id] = key
                actions.append(Apply(server_id, server.incarnation, server.address, placement))
        return actions

    def _publish_if_complete(self) -> list[Action]:
        placement = self._placement
        if placement is None or self._published:
            return []
        for server_id in placement.servers:
            key = (self._servers[server_id].incarnation, placement.epoch)
            if self._applied.get(server_id) != key:
                return []
        self._published = True
        return [Publish(placement)]


def _digest(member: Member) -> str:
    return member.model.digest if member.model else ""
