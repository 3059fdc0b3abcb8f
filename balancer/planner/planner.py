"""The balancer's state machine for placements, without I/O (cluster views and call outcomes in, actions out).

The life of a placement (epoch N + 1):

                         all its live servers have      every live client reports N + 1,
    something has        loaded their shares            or the timeout is over
    to change   +-----------+            +-----------+            +---------+
    ----------->| candidate |----------->| published |----------->| retired |---> idle: next candidate
                +-----------+  Publish   +-----------+   Retire   +---------+     when due
      Prepare to each    |                     |
      of its servers     | a server of it dies: another candidate, N + 2
                         +                     | an expert lost its last living replica: a candidate at once
                                               +

Until a client has acknowledged N + 1, servers also hold their shares of N. Any process, including this one,
may therefore die at any step, and each client still has a working placement. Epochs only rise, and servers
refuse an epoch older than one they have received, so a replaced balancer does no harm.

Reasons for a candidate, most urgent first:
  orphans: an expert's last living replica is lost. The expert is loaded elsewhere; nothing else changes.
  repair: a server joined, drains, cannot load for now, or has been dead longer than the grace
    period. A repair starts only when idle.
  audience: a client has been cut from some servers for longer than the grace. The servers that it reaches
    get the replicas it lacks.
  proposal: the rebalancer or an operator wants another placement. A proposal is accepted only when idle.

Terms:
  share: what a placement gives one server.
  idle: servers hold the published placement and nothing else.
  recovery: a balancer that starts in a running cluster asks its servers what they hold, and starts from that.
  stage: one of several placements of a proposal, when servers have no memory for the old and the new one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from balancer.planner.actions import (
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
from balancer.planner.audiences import Audiences
from balancer.planner.candidates import (
    Candidate,
    first,
    has_orphans,
    lacking_without,
    recovered,
    repaired,
    with_orphans,
)
from balancer.planner.constraints import Constraints
from balancer.planner.digests import Digests, ExpertDigests
from balancer.planner.layout import Layout
from balancer.planner.ledger import Ledger
from balancer.planner.pool import EPOCHS_OF_A_LIFE, ServerPool
from balancer.planner.steps import Steps
from balancer.policies.capacity import NoCapacityError
from eaas.membership.cluster_view import RETURN_GRACE_S
from eaas.types import Member, Placement

__all__ = ["Planner"]

# How long a loaded candidate waits for clients to connect to its new servers.
_REACH_S = 5.0


class Planner:
    """Makes placements and takes each through its states (see the module's docstring).

    Args:
        expected_servers: Expert servers to wait for before the first placement.
        redundancy: Servers that hold each expert; all of them while there are fewer.
        dead_grace_s: How long to wait for a dead server's return.
        ack_timeout_s: Longest wait for clients that stay on an older placement.
        layout: Lays out placements; evenly by default.

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
        self._layout = layout or Layout(redundancy)
        self._ack_timeout_s = ack_timeout_s
        self._pool = ServerPool(dead_grace_s)
        self._current: Placement | None = None
        self._next: Placement | None = None
        self._next_willing: frozenset[str] = frozenset()
        self._next_holders: frozenset[str] = frozenset()
        self._next_is_urgent = False
        # Whether the next placement, or else the current one, was proposed.
        self._is_proposed = False
        self._retire_at = 0.0
        # Whether clients may have had a placement before the current one.
        self._there_was_one = False
        self._last_epoch = 0
        self._first_seen_at: float | None = None
        self._recovering = False
        # Whether a candidate was given up: servers may then have received an epoch above the current one.
        self._gave_up = False
        # The last complaint, to emit each only once.
        self._complained = ""
        self._layer_order: tuple[int, ...] = ()
        self._settled_epoch = 0
        self._ledger = Ledger()
        self._digests = ExpertDigests()
        self._steps = Steps(self._pool, self._ledger, self._digests)
        self._constraints = Constraints(self._pool, self._steps)
        self._holdings: dict[Life, npt.NDArray[np.bool_]] = {}
        self._audiences = Audiences(self._pool, lambda: self._layout.redundancy)
        self._nodes: Mapping[str, str] = {}
        # Epoch, and whether replicas of that placement share nodes that need not; None: not known.
        self._shares_nodes: tuple[int, bool] | None = None
        # Deadline for clients to connect to servers that are new in the candidate.
        self._held_until: float | None = None

    # -- events ---------------------------------------------------------------------------------

    def observe(self, members: Mapping[str, Member], now: float) -> list[Action]:
        """Process a new cluster view from the monitor; return the actions due, for `Rollout` to carry out."""
        self._pool.observe(members, now)
        if self._nodes != (nodes := self._pool.nodes):
            self._nodes = nodes
            self._layout.know(nodes)
            self._shares_nodes = None
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
        """Record a call as carried out (see `note_success`); return the actions due, as the publication."""
        self.note_success(call, holds_LE, told_epoch, digests_LE)
        return self.tick(now)

    def note_success(
        self,
        call: Call,
        holds_LE: npt.NDArray[np.bool_] | None = None,
        told_epoch: int = 0,
        digests_LE: Digests | None = None,
    ) -> None:
        """Record a call as carried out by its server; the next `tick` draws the conclusions.

        A tick takes time for every server, and a roll-out has two or three calls for every server: thus
        `Rollout` notes all that have arrived before it ticks.

        Args:
            call: The call.
            holds_LE: Answer to `Inspect`: experts that the server holds, bool (L, E).
            told_epoch: Answer to `Inspect`: the newest epoch the server has received, loaded or not.
            digests_LE: Answer to `Inspect`: digests of the held experts; None: the server states none.
        """
        self._ledger.succeeded(call)
        if isinstance(call, Inspect):
            assert holds_LE is not None
            self._holdings[call.life] = holds_LE
            self._last_epoch = max(self._last_epoch, told_epoch)
            # The digests of a server that does not serve yet were not compared with others.
            member = self._pool.alive.get(call.server_id)
            if digests_LE is not None and member is not None and member.epoch:
                self._digests.state(call.life, digests_LE)
        elif isinstance(call, Prepare):
            self._pool.forgive(call.life)

    def loaded(self, call: Prepare, now: float, digests_LE: Digests) -> list[Action]:
        """Record that a server has loaded its share (see `note_loaded`); return the actions due."""
        self.note_loaded(call, digests_LE)
        return self.tick(now)

    def note_loaded(self, call: Prepare, digests_LE: Digests) -> None:
        """Record that a server has loaded its share; once all have, a `tick` sends Prepare with digests.

        Args:
            call: The call.
            digests_LE: Digests of the experts it read; 0 for experts that it does not hold.
        """
        self._digests.state(call.life, digests_LE)
        self._steps.loaded(call)

    def mismatched(self, call: Call, now: float, why: str) -> list[Action]:
        """Give a server no more experts: it reports that an expert's bytes differ from the cluster's."""
        self._pool.is_damaged(call.life)
        return [Refuse(call.server_id, why), *self.tick(now)]

    def failed(self, call: Call, now: float, *, timed_out: bool = False) -> list[Action]:
        """Process a failed call, repeated while `is_wanted`. After too many, its server gets no experts."""
        if not self.is_wanted(call):
            return []
        if isinstance(call, Retire):
            # The server holds more than its share until a retry reaches it, which nothing waits for.
            self._ledger.in_vain(call)
            return self.tick(now)
        # Before the first placement the failure is not counted, because no other servers can take over.
        if self._current is None and not self._recovering:
            return []
        unable_s = self._pool.count_failure(call.life, now, timed_out=timed_out)
        if not unable_s:
            return []
        self._ledger.ask_again({call.life})
        what = "took too long" if timed_out else "failed too often"
        why = f"it {what} to say or load what it holds; it is tried again in {unable_s:.0f} s"
        return [Refuse(call.server_id, why), *self.tick(now)]

    def is_wanted(self, call: Call) -> bool:
        """Whether to send a delayed or failed call: its server is alive, its placement still wanted."""
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
        """Begin, drop, publish or retire a placement if due; return the actions. Also called at `wake_at`."""
        self._pool.pass_time(now)
        if self._next is not None and not self._stands(self._next, now):
            self._next, self._gave_up = None, True
            self._constraints.stages.clear()
        actions = self._settle()
        if self._next is None:
            actions += self._next_candidate(now)
        actions += self._pool.new_refusals(now)
        if placement := self._next or self._current:
            self._steps.decide_digests(placement)
        actions += [Complain(complaint) for complaint in self._pool.new_complaints()]
        actions += self._prepare_if_due()
        actions += self._publish_if_complete(now)
        actions += self._retire_if_due(now)
        return actions + self._settle()

    def wake_at(self, now: float) -> float | None:
        """Return when `Rollout` must call `tick` even without an event; None: never."""
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
        """Mark a live server as leaving, before it is told to drain; or return why it cannot leave."""
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
        """Undo `let_drain`, because the drain call did not reach the server."""
        self._pool.stays_after_all(server_id)

    @property
    def fewest_servers(self) -> int:
        """Fewest servers that hold every expert with the wanted redundancy; `Scale` accepts no fewer."""
        return self._layout.redundancy

    @property
    def current(self) -> Placement | None:
        """The last published placement, which clients use; None before this balancer's first."""
        return self._current

    def has_time(self, call: Prepare | Retire) -> bool:
        """Whether a call may be delayed: it belongs to a proposal, and no client or expert depends on it."""
        # A server that returned still lacks experts that clients may ask it for.
        returned = isinstance(call, Prepare) and call.placement is self._current
        return self._is_proposed and not returned

    @property
    def is_at_rest(self) -> bool:
        """Whether no placement is being rolled out and no stage is pending: proposals are accepted."""
        return self._is_idle() and not self._constraints.stages

    @property
    def pool(self) -> ServerPool:
        """The planner's view of servers and clients, for snapshots taken on the planner's thread."""
        return self._pool

    @property
    def digests_LE(self) -> Digests | None:
        """Known digests of the experts' bytes, which never change; None: none is known."""
        return self._digests.known_LE

    # -- constraints ----------------------------------------------------------------------------

    def remember(self, wanted: Placement) -> None:
        """Set the last placement the previous balancer wanted; recovery keeps it if its servers are there."""
        self._constraints.wanted = wanted

    def propose(self, stages: Sequence[Candidate], epoch: int) -> str | None:
        """Propose another placement, or several in sequence, for the rebalancer or an operator.

        Args:
            stages: The placements, at least one. Servers that cannot be given experts gain none in them.
            epoch: Epoch of the placement that the stages were made from.

        Returns:
            The reason for a refusal; None: accepted, and begun at the next `tick`.
        """
        if self._current is None:
            return "there is no placement yet"
        if self._current.epoch != epoch:
            return f"the placement is of epoch {self._current.epoch} by now, not {epoch}"
        if not self.is_at_rest:
            return "a roll-out is going on"
        refusal = self._constraints.propose(stages, self._current)
        self._is_proposed = refusal is None
        return refusal

    def level(self) -> None:
        """Allow repair to even out a placement that was proposed; an operator has set the policy `spread`."""
        self._constraints.is_granted = False

    def member(self, server_id: str) -> Member | None:
        """Return a live server of the cluster's model by its id, for `DrainServer`; None: there is none."""
        return self._pool.alive.get(server_id)

    # -- candidates -----------------------------------------------------------------------------

    def _next_candidate(self, now: float) -> list[Action]:
        current, complained = self._current, self._complained
        self._complained = ""
        try:
            return self._begin(now) if current is None else self._go_on(current, now)
        except NoCapacityError as error:
            self._complained = str(error)
            return [Complain(str(error))] if self._complained != complained else []

    def _begin(self, now: float) -> list[Action]:
        """Begin this balancer's first placement: recover a running cluster, or start a new one."""
        shape = self._pool.choose_model()
        if shape is None:
            return []
        full = (shape.num_layers, shape.num_experts)
        able, staying = self._pool.able, self._pool.staying
        # This balancer has made no candidate yet, so an epoch above 0 is that of a previous balancer.
        self._recovering = self._recovering or bool(
            self._pool.highest_epoch and not self._last_epoch
        )
        if not self._recovering:
            # Servers refused for damaged bytes count as present.
            if able and len(able.keys() | self._pool.damaged) >= self._expected:
                self._candidate(first(self._layout, *full, self._pool))
            return []
        # A monitor that has also restarted may not list all servers yet.
        assert self._first_seen_at is not None
        if len(self._pool.alive) < self._expected and now < self._first_seen_at + RETURN_GRACE_S:
            return []
        # Includes newcomers, which may have received an epoch that they have not loaded, and leaving
        # servers, which may be the last with the digests of the experts they hold.
        unknown = [
            m for m in self._pool.willing.values() if self._pool.life(m) not in self._holdings
        ]
        if not unknown and able:
            self._digests.decide(self._holdings)
            none_LE = np.zeros(full, dtype=np.bool_)
            held = {s: self._holdings.get(self._pool.life(m), none_LE) for s, m in staying.items()}
            constraints = self._constraints
            candidate, *constraints.stages = recovered(
                held, self._layout, constraints.wanted, self._pool
            )
            self._candidate(candidate)
            constraints.is_granted = constraints.wanted is not None
        return self._ledger.begin(
            [Inspect(m.id, self._pool.life(m), m.address, *full) for m in unknown]
        )

    def _go_on(self, current: Placement, now: float) -> list[Action]:
        """Begin the placement after the current one, if one is due: for orphans first, then repair."""
        if not self._pool.able:
            return []
        idle = self._is_idle()
        self._pool.most.clear()
        limited = self._pool.capacity_S((*current.servers, *self._pool.able)) is not None
        if limited:
            self._pool.most.update(self._steps.most_of_unheard(current))
        # A candidate that was given up has left replicas behind: first restore the current placement.
        clears = limited and self._gave_up
        candidate = None if clears else with_orphans(current, self._pool, at_rest=idle)
        urgent = clears or candidate is not None
        further: list[Candidate] = []
        if candidate is None and not clears and (self._gave_up or idle):
            # With limited memory placements cannot be fully even, so an uneven one is not repaired.
            is_wanted = (
                self._constraints.keeps_as_is or limited or self._audiences.has_more(current)
            )
            candidates = repaired(
                *(current, self._pool, self._layout, now),
                is_wanted=is_wanted,
                shares_nodes=not is_wanted and self._share_nodes(current),
            )
            candidate, further = (candidates[0], candidates[1:]) if candidates else (None, [])
        if candidate is None and self._gave_up:
            candidate = self._audiences.plain
        if candidate is not None:
            # A pending proposal was made before this change, so its stages are dropped.
            self._constraints.stages = further
            self._is_proposed = False
        elif idle:
            candidate = self._audiences.due(current) or self._constraints.next_stage(
                current, limited
            )
        if candidate is not None:
            self._candidate(candidate)
            self._next_is_urgent = urgent
        return []

    def _share_nodes(self, current: Placement) -> bool:
        """Whether replicas of the placement share nodes that need not, as after a change of a node's name."""
        if self._shares_nodes is None or self._shares_nodes[0] != current.epoch:
            servers, holds_LSE, shares_LSE = current.servers, current.holds_LSE, current.shares_LSE
            found = self._layout.levels and self._layout.gets_apart(servers, holds_LSE, shares_LSE)
            self._shares_nodes = current.epoch, found
        return self._shares_nodes[1]

    def _candidate(self, plain: Candidate) -> None:
        candidate, self._held_until = self._audiences.candidate_made(plain), None
        servers = candidate.servers
        own = EPOCHS_OF_A_LIFE * (self._pool.balancer_life - 1)
        self._last_epoch = 1 + max(
            self._last_epoch, self._pool.highest_epoch, own, self._constraints.last_epoch
        )
        shares_LSE = candidate.shares_LSE.astype(np.float32)
        self._next = Placement(self._last_epoch, servers, candidate.holds_LSE, shares_LSE)
        self._layer_order = candidate.layer_order
        self._next_willing = frozenset(servers) & self._pool.willing.keys()
        # Includes servers that cannot load more, but hold what an older placement gave them.
        self._next_holders = frozenset(servers) & self._pool.holders.keys()
        self._next_is_urgent = False

    def _stands(self, candidate: Placement, now: float) -> bool:
        """Whether a candidate's servers live, can load and are reached; else `tick` gives it up."""
        if self._held_until is not None and now >= self._held_until:
            return False
        if self._current is None and self._pool.highest_epoch > candidate.epoch:
            # After a late call of the previous balancer, its servers refuse this candidate.
            return False
        current = self._current
        if current is not None and not self._next_is_urgent and has_orphans(current, self._pool):
            # Give this candidate up: orphans must not wait for its loads.
            return False
        pool = self._pool
        return (
            pool.willing.keys() >= self._next_willing and pool.holders.keys() >= self._next_holders
        )

    def _is_idle(self) -> bool:
        """Whether servers hold nothing but the published placement, or do not answer Retire."""
        placement = self._current
        return placement is not None and self._next is None and self._steps.is_retired(placement)

    # -- actions --------------------------------------------------------------------------------

    def _prepare_if_due(self) -> list[Action]:
        placement = self._next or self._current
        if placement is None:
            return []
        return self._steps.prepare(placement, self._layer_order)

    def _publish_if_complete(self, now: float) -> list[Action]:
        placement = self._next
        if placement is None or not self._steps.is_prepared(placement):
            return []
        if self._current is not None and self._pool.has_unreached(placement):
            # Since the candidate was made, a client has joined, or has lost its connection to a new server.
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
        """Whether to call Retire; not during a candidate, whose servers would refuse the older epoch."""
        return self._next is None and not self._gave_up

    def _retire_if_due(self, now: float) -> list[Action]:
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
