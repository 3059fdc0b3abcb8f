"""What the balancer does next: a state machine without I/O (views and outcomes in, actions out).

The life of a placement (epoch N + 1):

                     every live server of it           every live client reports N + 1,
    something is     has loaded what it lacks          or its time is over
    to change   +-------+            +---------------+            +---------+
    ----------->| draft |----------->|   published   |----------->| retired |---> idle: draft again
                +-------+  Publish   +---------------+   Retire   +---------+     where due
       Prepare to each  |                     |
       server of it     | a server of it dies: another draft, N + 2
                        +                     | an expert lost its last living replica: a draft at once
                                              +

Until a client has acknowledged N + 1, servers hold what N gave them, too: whoever dies at whatever step,
this process included, leaves each client with a placement that is in force. Epochs only rise, and servers
refuse an older one than they know, so a balancer that was replaced does no harm.

Why a draft is made, most urgent first:
  orphans: an expert's last living replica is gone. It is put elsewhere; nothing else is touched.
  repair: a server joined, drains, cannot load, or is dead for longer than the grace. Waits for idle.

Terms:
  share: what a placement gives one server.
  idle: the published placement is all that servers hold.
  recovery: a balancer that starts in a running cluster asks its servers what they hold, and goes on from
    there.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from balancer.actions import Action, Call, Inspect, Prepare, Publish, Refuse, Retire
from balancer.drafts import recovered, repaired, with_orphans
from balancer.policies.repair import even_shares
from balancer.policies.spread import spread
from balancer.pool import ServerPool
from eaas.membership import RETURN_GRACE_S
from eaas.types import Member, MemberState, Placement

__all__ = ["Planner"]

# Each life of the balancer counts from another thousand on: the one before may have told servers of an
# epoch that nobody has reported yet, and two placements of one epoch are never to be taken for each other.
_EPOCHS_OF_A_LIFE = 1000

_Key = tuple[type[Call], str, int, int]


class Planner:
    """Makes placements and takes them through their life (see the module's head).

    Args:
        expected_servers: Expert servers to wait for before the first placement.
        redundancy: Servers that hold each expert; all of them while there are fewer.
        dead_grace_s: How long a dead server's return is waited for.
        ack_timeout_s: Longest wait for clients that stay on an older placement.

    Raises:
        ValueError: redundancy is above expected_servers.
    """

    def __init__(
        self,
        expected_servers: int,
        redundancy: int,
        dead_grace_s: float = 30.0,
        ack_timeout_s: float = 10.0,
    ) -> None:
        if redundancy > expected_servers:
            raise ValueError(
                f"redundancy {redundancy} is above expected_servers {expected_servers}"
            )
        self._expected = expected_servers
        self._redundancy = redundancy
        self._ack_timeout_s = ack_timeout_s
        self._pool = ServerPool(dead_grace_s)
        self._current: Placement | None = None
        self._next: Placement | None = None
        self._next_alive: frozenset[str] = frozenset()
        self._retire_at = 0.0
        self._last_epoch = 0
        self._first_seen_at: float | None = None
        self._recovering = False
        # A draft was given up: servers may have heard of an epoch above the current one.
        self._gave_up = False
        # Calls that were begun, and those that succeeded.
        self._asked: set[_Key] = set()
        self._done: set[_Key] = set()
        self._holdings: dict[tuple[str, int], npt.NDArray[np.bool_]] = {}

    # -- events ---------------------------------------------------------------------------------

    def observe(self, members: Mapping[str, Member], now: float) -> list[Action]:
        """The membership changed."""
        self._pool.observe(members, now)
        if self._first_seen_at is None:
            self._first_seen_at = now
        return self.tick(now)

    def succeeded(
        self, call: Call, now: float, holds_LE: npt.NDArray[np.bool_] | None = None
    ) -> list[Action]:
        """A server did what it was told; to `Inspect` it answered with what it holds."""
        self._done.add(_key(call))
        if isinstance(call, Inspect):
            assert holds_LE is not None
            self._holdings[call.server_id, call.incarnation] = holds_LE
        elif isinstance(call, Prepare):
            self._pool.forgive(call.server_id, call.incarnation)
        return self.tick(now)

    def failed(self, call: Call, now: float) -> list[Action]:
        """A server did not. It is to be tried again while `is_wanted`."""
        # Before the first placement there is nobody to go on with instead.
        may_give_up = isinstance(call, Prepare) and self._current is not None
        if not (may_give_up and self.is_wanted(call)):
            return []
        if not self._pool.count_failure(call.server_id, call.incarnation):
            return []
        why = "it failed to load its share too often; it is tried again when it is restarted"
        return [Refuse(call.server_id, why), *self.tick(now)]

    def is_wanted(self, call: Call) -> bool:
        """Whether a failed attempt is worth another one: the server lives and the plan stands."""
        member = self._pool.alive.get(call.server_id)
        if member is None or member.incarnation != call.incarnation or self._pool.is_unable(member):
            return False
        match call:
            case Prepare():
                return call.placement in (self._next, self._current)
            case Retire():
                return call.placement is self._current and self._next is None
            case Inspect():
                return self._current is None

    def tick(self, now: float) -> list[Action]:
        """Do what is due. To be called at `wake_at`, too."""
        if self._next is not None and not self._stands(self._next):
            self._next, self._gave_up = None, True
        actions: list[Action] = []
        if self._next is None:
            current = self._current
            actions += self._begin(now) if current is None else self._go_on(current, now)
        actions += [Refuse(*refusal) for refusal in self._pool.new_refusals()]
        actions += self._prepare_where_due()
        actions += self._publish_if_complete(now)
        actions += self._retire_where_due(now)
        return actions

    def wake_at(self, now: float) -> float | None:
        """When time alone may make something due."""
        times: list[float] = []
        if self._current is None:
            if self._first_seen_at is not None:
                times = [self._first_seen_at + RETURN_GRACE_S]
        else:
            times = self._pool.grace_ends(self._current.servers)
            if not self._is_idle():
                times.append(self._retire_at)
        return min((t for t in times if t > now), default=None)

    def why_not_drain(self, server_id: str) -> str | None:
        """What speaks against taking a live server out; None where nothing does."""
        if self._pool.able.keys() - {server_id}:
            return None
        return (
            f"{server_id} is the last server that can hold experts: "
            "start another one first, or stop the cluster"
        )

    @property
    def fewest_servers(self) -> int:
        """Servers that it takes to hold every expert as often as is wanted."""
        return self._redundancy

    def member(self, server_id: str) -> Member | None:
        """A live server of the cluster."""
        return self._pool.alive.get(server_id)

    # -- drafts ---------------------------------------------------------------------------------

    def _begin(self, now: float) -> list[Action]:
        """The first placement of this balancer."""
        shape = self._pool.choose_model()
        if shape is None:
            return []
        full = (shape.num_layers, shape.num_experts)
        able, staying = self._pool.able, self._pool.staying
        told = [m for m in staying.values() if m.epoch]
        # Of another balancer's, be it that only clients know of it: this one has made no draft yet.
        self._recovering = self._recovering or bool(
            self._pool.highest_epoch and not self._last_epoch
        )
        if not self._recovering:
            if len(able) >= self._expected:
                holds_LSE, _ = spread(*full, len(able), self._redundancy)
                self._draft(tuple(able), holds_LSE)
            return []
        # A monitor that was restarted, too, may not know all of them yet.
        assert self._first_seen_at is not None
        if len(staying) < self._expected and now < self._first_seen_at + RETURN_GRACE_S:
            return []
        unknown = [m for m in told if _life(m) not in self._holdings]
        if not unknown and able:
            none_LE = np.zeros(full, dtype=np.bool_)
            held = {s: self._holdings.get(_life(m), none_LE) for s, m in staying.items()}
            self._draft(*recovered(held, self._redundancy))
        return self._ask(
            [Inspect(m.id, m.incarnation, m.address, shape.num_experts) for m in unknown]
        )

    def _go_on(self, current: Placement, now: float) -> list[Action]:
        """The placement after the current one, if one is due."""
        if not self._pool.able:
            return []
        draft = with_orphans(current, self._pool)
        if draft is None and (self._gave_up or self._is_idle()):
            draft = repaired(current, self._pool, self._redundancy, now)
        if draft is None and self._gave_up:
            draft = (current.servers, current.holds_LSE)
        if draft is not None:
            self._draft(*draft)
        return []

    def _draft(self, servers: tuple[str, ...], holds_LSE: npt.NDArray[np.bool_]) -> None:
        own = _EPOCHS_OF_A_LIFE * (self._pool.balancer_life - 1)
        self._last_epoch = 1 + max(self._last_epoch, self._pool.highest_epoch, own)
        self._next = Placement(self._last_epoch, servers, holds_LSE, even_shares(holds_LSE))
        self._next_alive = frozenset(servers) & self._pool.willing.keys()

    def _stands(self, draft: Placement) -> bool:
        """Whether those that a draft counts on still live, and can load."""
        if self._current is None and self._pool.highest_epoch > draft.epoch:
            # A late call of the balancer before: its servers refuse this draft.
            return False
        return self._pool.willing.keys() >= self._next_alive

    def _is_idle(self) -> bool:
        """Whether the servers hold the published placement and nothing else."""
        placement = self._current
        return (
            placement is not None
            and self._next is None
            and all((Retire, *_life(m), placement.epoch) in self._done for m in self._retirable())
        )

    # -- actions --------------------------------------------------------------------------------

    def _ask(self, calls: list[Call]) -> list[Action]:
        new = [call for call in calls if _key(call) not in self._asked]
        self._asked.update(_key(call) for call in new)
        return list(new)

    def _prepare_where_due(self) -> list[Action]:
        placement = self._next or self._current
        if placement is None:
            return []
        calls: list[Call] = []
        for server_id, server in self._pool.willing.items():
            if server_id not in placement.servers:
                continue
            call = Prepare(server_id, server.incarnation, server.address, placement)
            if server.state is MemberState.SERVING and server.epoch == placement.epoch:
                # Its monitor's silence ended its lease, not its weights.
                self._asked.add(_key(call))
                self._done.add(_key(call))
            calls.append(call)
        return self._ask(calls)

    def _publish_if_complete(self, now: float) -> list[Action]:
        placement = self._next
        if placement is None:
            return []
        for server_id, server in self._pool.willing.items():
            key = (Prepare, *_life(server), placement.epoch)
            if server_id in placement.servers and key not in self._done:
                return []
        self._current, self._next, self._gave_up = placement, None, False
        self._retire_at = now + self._ack_timeout_s
        self._holdings.clear()
        # What was said of older epochs matters no more.
        for keys in (self._asked, self._done):
            keys.intersection_update({k for k in keys if k[3] == placement.epoch})
        return [Publish(placement)]

    def _retirable(self) -> list[Member]:
        """Servers that hold experts, by this placement or by an older one."""
        placement = self._current
        assert placement is not None
        return [
            m
            for s, m in self._pool.willing.items()
            if s in placement.servers or m.state is not MemberState.JOINING
        ]

    def _retire_where_due(self, now: float) -> list[Action]:
        placement = self._current
        if placement is None or self._next is not None:
            return []
        if now < self._retire_at and self._pool.clients_behind(placement.epoch):
            return []
        calls: list[Call] = []
        for m in self._retirable():
            prepared = (Prepare, *_life(m), placement.epoch) in self._done
            if prepared or m.id not in placement.servers:
                calls.append(Retire(m.id, m.incarnation, m.address, placement))
        return self._ask(calls)


def _life(member: Member) -> tuple[str, int]:
    return (member.id, member.incarnation)


def _key(call: Call) -> _Key:
    epoch = 0 if isinstance(call, Inspect) else call.placement.epoch
    return (type(call), call.server_id, call.incarnation, epoch)
