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
  repair: a server joined, drains, cannot load for now, or is dead for longer than the grace. Waits for idle.
  audience: a client has been cut from some servers for longer than the grace. It gets replicas on others.
  proposal: somebody who looks at the load, or an operator, wants another one. Taken when idle.

Terms:
  share: what a placement gives one server.
  idle: the published placement is all that servers hold.
  recovery: a balancer that starts in a running cluster asks its servers what they hold, and goes on from
    there.
  stage: one of several placements that a proposal takes, as servers have no room for both at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from balancer.actions import (
    Action,
    Call,
    Complain,
    Inspect,
    Life,
    Prepare,
    Publish,
    Refuse,
    Retire,
    Settled,
)
from balancer.audiences import Audiences
from balancer.digests import Digests, ExpertDigests
from balancer.drafts import (
    Draft,
    first,
    has_orphans,
    lacking_without,
    recovered,
    repaired,
    with_orphans,
)
from balancer.layout import EvenLayout, Layout
from balancer.ledger import Ledger
from balancer.policies.room import NoRoomError
from balancer.pool import EPOCHS_OF_A_LIFE, ServerPool
from balancer.steps import Steps
from balancer.wishes import Wishes
from eaas.membership import RETURN_GRACE_S
from eaas.types import Member, Placement

__all__ = ["Planner"]

# How long a draft that is loaded waits for clients to connect to its new servers.
_REACH_S = 5.0


class Planner:
    """Makes placements and takes them through their life (see the module's head).

    Args:
        expected_servers: Expert servers to wait for before the first placement.
        redundancy: Servers that hold each expert; all of them while there are fewer.
        dead_grace_s: How long a dead server's return is waited for.
        ack_timeout_s: Longest wait for clients that stay on an older placement.
        layout: Decides what placements look like; even ones by default.

    Raises:
        ValueError: redundancy is above expected_servers.
    """

    def __init__(
        self,
        expected_servers: int,
        redundancy: int,
        dead_grace_s: float = 30.0,
        ack_timeout_s: float = 10.0,
        layout: Layout | None = None,
    ) -> None:
        if redundancy > expected_servers:
            raise ValueError(
                f"redundancy {redundancy} is above expected_servers {expected_servers}"
            )
        self._expected = expected_servers
        self._layout: Layout = layout or EvenLayout(redundancy)
        self._ack_timeout_s = ack_timeout_s
        self._pool = ServerPool(dead_grace_s)
        self._current: Placement | None = None
        self._next: Placement | None = None
        self._next_willing: frozenset[str] = frozenset()
        self._next_holders: frozenset[str] = frozenset()
        self._next_is_urgent = False
        # Of the placement on its way, or else of the current one.
        self._is_proposed = False
        self._retire_at = 0.0
        # Of clients, before the current one.
        self._there_was_one = False
        self._last_epoch = 0
        self._first_seen_at: float | None = None
        self._recovering = False
        # A draft was given up: servers may have heard of an epoch above the current one.
        self._gave_up = False
        # What could not be done the last time.
        self._complained = ""
        self._layer_order: tuple[int, ...] = ()
        self._settled_epoch = 0
        self._ledger = Ledger()
        self._digests = ExpertDigests()
        self._steps = Steps(self._pool, self._ledger, self._digests)
        self._wishes = Wishes(self._pool, self._steps)
        self._holdings: dict[Life, npt.NDArray[np.bool_]] = {}
        self._audiences = Audiences(self._pool, lambda: self._layout.redundancy)
        # Until then clients may connect to the servers that are new in the draft.
        self._held_until: float | None = None

    # -- events ---------------------------------------------------------------------------------

    def observe(self, members: Mapping[str, Member], now: float) -> list[Action]:
        """The membership changed."""
        self._pool.observe(members, now)
        if self._first_seen_at is None:
            self._first_seen_at = now
        return self.tick(now)

    def succeeded(
        self,
        call: Call,
        now: float,
        holds_LE: npt.NDArray[np.bool_] | None = None,
        told_epoch: int = 0,
        digests_LE: Digests | None = None,
    ) -> list[Action]:
        """A server did what it was told.

        Args:
            call: What that was.
            now: Monotonic seconds.
            holds_LE: To `Inspect`: what it holds, bool (L, E).
            told_epoch: To `Inspect`: the newest that it was ever told, be it not loaded.
            digests_LE: To `Inspect`: of what it holds; None: it states none.
        """
        self._ledger.succeeded(call)
        if isinstance(call, Inspect):
            assert holds_LE is not None
            self._holdings[call.life] = holds_LE
            self._last_epoch = max(self._last_epoch, told_epoch)
            # A server that has not begun to serve was not compared with any other.
            member = self._pool.alive.get(call.server_id)
            if digests_LE is not None and member is not None and member.epoch:
                self._digests.state(call.life, digests_LE)
        elif isinstance(call, Prepare):
            self._pool.forgive(call.life)
        return self.tick(now)

    def loaded(self, call: Prepare, now: float, digests_LE: Digests) -> list[Action]:
        """A server has loaded its share, and serves it once it was sent digests that the call lacked.

        Args:
            call: What it was told.
            now: Monotonic seconds.
            digests_LE: Of what it read; 0 where it holds nothing.
        """
        self._digests.state(call.life, digests_LE)
        self._steps.loaded(call)
        return self.tick(now)

    def mismatched(self, call: Call, now: float, why: str) -> list[Action]:
        """The bytes of an expert on a server are not those of the cluster: it is given nothing more."""
        self._pool.is_damaged(call.life)
        return [Refuse(call.server_id, why), *self.tick(now)]

    def failed(self, call: Call, now: float, *, timed_out: bool = False) -> list[Action]:
        """A server did not, or not in time. It is to be tried again while `is_wanted`."""
        if not self.is_wanted(call):
            return []
        if isinstance(call, Retire):
            # It holds more than its share until it hears it: nobody waits for that.
            self._ledger.in_vain(call)
            return self.tick(now)
        # Before the first placement there is nobody to go on with instead.
        if self._current is None and not self._recovering:
            return []
        unable_s = self._pool.count_failure(call.life, now, timed_out=timed_out)
        if not unable_s:
            return []
        # Then it is to be asked again.
        self._ledger.ask_again(call.life)
        what = "took too long" if timed_out else "failed too often"
        why = f"it {what} to say or load what it holds; it is tried again in {unable_s:.0f} s"
        return [Refuse(call.server_id, why), *self.tick(now)]

    def is_wanted(self, call: Call) -> bool:
        """Whether a failed attempt is worth another one: the server lives and the plan stands."""
        member = self._pool.alive.get(call.server_id)
        if member is None or self._pool.life(member) != call.life or self._pool.is_unable(member):
            return False
        match call:
            case Prepare():
                return call.placement in (self._next, self._current)
            case Retire():
                return call.placement is self._current and self._may_retire
            case Inspect():
                return self._current is None

    def tick(self, now: float) -> list[Action]:
        """Do what is due. To be called at `wake_at`, too."""
        self._pool.pass_time(now)
        if self._next is not None and not self._stands(self._next, now):
            self._next, self._gave_up = None, True
            self._wishes.stages.clear()
        actions = self._settle()
        if self._next is None:
            actions += self._next_draft(now)
        actions += self._pool.new_refusals(now)
        if placement := self._next or self._current:
            self._steps.decide_digests(placement)
        actions += [Complain(complaint) for complaint in self._pool.new_complaints()]
        actions += self._prepare_where_due()
        actions += self._publish_if_complete(now)
        actions += self._retire_where_due(now)
        return actions + self._settle()

    def wake_at(self, now: float) -> float | None:
        """When time alone may make something due."""
        times = [*self._pool.due_at, *filter(None, [self._held_until])]
        if self._current is None:
            if self._first_seen_at is not None:
                times.append(self._first_seen_at + RETURN_GRACE_S)
        else:
            times += self._pool.grace_ends(self._current.servers)
            if not self._is_idle():
                times.append(self._retire_at)
        return min((t for t in times if t > now), default=None)

    def let_drain(self, server_id: str) -> str | None:
        """What speaks against taking a live server out; None if nothing: then it counts as leaving."""
        current = self._current
        if current is not None and (lacking := lacking_without(server_id, current, self._pool)):
            return lacking
        if self._pool.let_drain(server_id):
            return None
        return (
            f"{server_id} is the last server that can hold experts: "
            "start another one first, or stop the cluster"
        )

    def stays_after_all(self, server_id: str) -> None:
        """A server that was let drain was not told so."""
        self._pool.stays_after_all(server_id)

    @property
    def fewest_servers(self) -> int:
        """Servers that it takes to hold every expert as often as is wanted."""
        return self._layout.redundancy

    @property
    def current(self) -> Placement | None:
        """The placement that was published last; None before the first."""
        return self._current

    @property
    def coming(self) -> Placement | None:
        """The one that servers are loading."""
        return self._next

    def has_time(self, call: Prepare | Retire) -> bool:
        """Whether nobody waits for it: it is of a proposal that is rolled out, and no expert is at risk."""
        # A server that returned has nothing yet of what clients may ask it for.
        returned = isinstance(call, Prepare) and call.placement is self._current
        return self._is_proposed and not returned

    @property
    def is_at_rest(self) -> bool:
        """Nothing is on its way, and nothing is to follow."""
        return self._is_idle() and not self._wishes.stages

    @property
    def pool(self) -> ServerPool:
        """The servers."""
        return self._pool

    # -- wishes ---------------------------------------------------------------------------------

    def remember(self, wanted: Placement) -> None:
        """What the balancer before wanted last: where its servers still are that is what they get."""
        self._wishes.wanted = wanted

    def propose(self, stages: Sequence[Draft], epoch: int) -> str | None:
        """Somebody wants another placement, or several, one after another.

        Args:
            stages: At least one. Of servers that can be given experts, and of others that are given none.
            epoch: Of the placement that they were made from.

        Returns:
            What speaks against it; None: it is begun with the next `tick`.
        """
        if self._current is None:
            return "there is no placement yet"
        if self._current.epoch != epoch:
            return f"the placement is of epoch {self._current.epoch} by now, not {epoch}"
        if not self.is_at_rest:
            return "a roll-out is going on"
        refusal = self._wishes.propose(stages, self._current)
        self._is_proposed = refusal is None
        return refusal

    def level(self) -> None:
        """What was proposed before is no reason any more."""
        self._wishes.is_granted = False

    def member(self, server_id: str) -> Member | None:
        """A live server of the cluster."""
        return self._pool.alive.get(server_id)

    # -- drafts ---------------------------------------------------------------------------------

    def _next_draft(self, now: float) -> list[Action]:
        current, complained = self._current, self._complained
        self._complained = ""
        try:
            return self._begin(now) if current is None else self._go_on(current, now)
        except NoRoomError as error:
            self._complained = str(error)
            return [Complain(str(error))] if self._complained != complained else []

    def _begin(self, now: float) -> list[Action]:
        """The first placement of this balancer."""
        shape = self._pool.choose_model()
        if shape is None:
            return []
        full = (shape.num_layers, shape.num_experts)
        able, staying = self._pool.able, self._pool.staying
        # Of another balancer's, be it that only clients know of it: this one has made no draft yet.
        self._recovering = self._recovering or bool(
            self._pool.highest_epoch and not self._last_epoch
        )
        if not self._recovering:
            # Those that are turned away are not waited for once more.
            if able and len(able.keys() | self._pool.damaged) >= self._expected:
                self._draft(first(self._layout, *full, self._pool))
            return []
        # A monitor that was restarted, too, may not know all of them yet.
        assert self._first_seen_at is not None
        if len(self._pool.alive) < self._expected and now < self._first_seen_at + RETURN_GRACE_S:
            return []
        # Newcomers, too: they may have been told of an epoch that they have not loaded.
        # And those that leave: they may be the last to know the digests of what they hold.
        unknown = [
            m for m in self._pool.willing.values() if self._pool.life(m) not in self._holdings
        ]
        if not unknown and able:
            self._digests.decide(self._holdings)
            none_LE = np.zeros(full, dtype=np.bool_)
            held = {s: self._holdings.get(self._pool.life(m), none_LE) for s, m in staying.items()}
            wishes = self._wishes
            draft, *wishes.stages = recovered(held, self._layout, wishes.wanted, self._pool)
            self._draft(draft)
            wishes.is_granted = wishes.wanted is not None
        return self._ledger.begin(
            [Inspect(m.id, self._pool.life(m), m.address, *full) for m in unknown]
        )

    def _go_on(self, current: Placement, now: float) -> list[Action]:
        """The placement after the current one, if one is due."""
        if not self._pool.able:
            return []
        idle = self._is_idle()
        self._pool.most.clear()
        limited = self._pool.room_S((*current.servers, *self._pool.able)) is not None
        if limited:
            self._pool.most.update(self._steps.most_of_unheard(current))
        # What was given up has left something behind: first everybody is to hold the current placement.
        clears = limited and self._gave_up
        draft = None if clears else with_orphans(current, self._pool, at_rest=idle)
        urgent = clears or draft is not None
        further: list[Draft] = []
        if draft is None and not clears and (self._gave_up or idle):
            # Where memory is limited nothing is as even as it could be.
            is_wanted = self._wishes.keeps_as_is or limited or self._audiences.has_more(current)
            drafts = repaired(current, self._pool, self._layout, now, is_wanted=is_wanted)
            draft, further = (drafts[0], drafts[1:]) if drafts else (None, [])
        if draft is None and self._gave_up:
            draft = self._audiences.plain
        if draft is not None:
            # Whoever proposed does not know of this.
            self._wishes.stages = further
            self._is_proposed = False
        elif idle:
            draft = self._audiences.due(current) or self._wishes.next_stage(current, limited)
        if draft is not None:
            self._draft(draft)
            self._next_is_urgent = urgent
        return []

    def _draft(self, plain: Draft) -> None:
        draft, self._held_until = self._audiences.drafted(plain), None
        servers = draft.servers
        own = EPOCHS_OF_A_LIFE * (self._pool.balancer_life - 1)
        self._last_epoch = 1 + max(
            self._last_epoch, self._pool.highest_epoch, own, self._wishes.last_epoch
        )
        shares_LSE = draft.shares_LSE.astype(np.float32)
        self._next = Placement(self._last_epoch, servers, draft.holds_LSE, shares_LSE)
        self._layer_order = draft.layer_order
        self._next_willing = frozenset(servers) & self._pool.willing.keys()
        # Those that cannot load more, but have what an older placement gave them, as well.
        self._next_holders = frozenset(servers) & self._pool.holders.keys()
        self._next_is_urgent = False

    def _stands(self, draft: Placement, now: float) -> bool:
        """Whether those that a draft counts on still live, and can load, and clients reach them."""
        if self._held_until is not None and now >= self._held_until:
            return False
        if self._current is None and self._pool.highest_epoch > draft.epoch:
            # A late call of the balancer before: its servers refuse this draft.
            return False
        current = self._current
        if current is not None and not self._next_is_urgent and has_orphans(current, self._pool):
            # Its experts are not to wait until everybody else has loaded what this draft is about.
            return False
        pool = self._pool
        return (
            pool.willing.keys() >= self._next_willing and pool.holders.keys() >= self._next_holders
        )

    def _is_idle(self) -> bool:
        """Whether the servers hold the published placement and nothing else, or do not hear of it."""
        placement = self._current
        return placement is not None and self._next is None and self._steps.is_retired(placement)

    # -- actions --------------------------------------------------------------------------------

    def _prepare_where_due(self) -> list[Action]:
        placement = self._next or self._current
        if placement is None:
            return []
        return self._steps.prepare(placement, self._layer_order)

    def _publish_if_complete(self, now: float) -> list[Action]:
        placement = self._next
        if placement is None or not self._steps.is_prepared(placement):
            return []
        if self._current is not None and self._pool.has_unreached(placement):
            # Since the draft a client has lost a server that is new in it, or has come.
            self._held_until = self._held_until or now + _REACH_S
            return []
        self._held_until = None
        self._pool.place(placement)
        self._audiences.published()
        self._there_was_one = self._current is not None or self._recovering
        self._current, self._next, self._gave_up = placement, None, False
        self._retire_at = now + self._ack_timeout_s
        self._holdings.clear()
        self._ledger.keep(placement.epoch)
        return [Publish(placement)]

    @property
    def _may_retire(self) -> bool:
        """Not by a placement that a draft is to replace: a server that heard of the draft refuses it."""
        return self._next is None and not self._gave_up

    def _retire_where_due(self, now: float) -> list[Action]:
        placement = self._current
        if placement is None or not self._may_retire:
            return []
        if now < self._retire_at and self._pool.clients_behind(
            placement.epoch, self._there_was_one
        ):
            return []
        return self._steps.retire(placement)

    def _settle(self) -> list[Action]:
        placement = self._current
        if placement is None or self._settled_epoch == placement.epoch or not self._is_idle():
            return []
        self._settled_epoch = placement.epoch
        return [Settled(placement)]
