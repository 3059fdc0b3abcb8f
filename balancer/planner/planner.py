"""The balancer's state machine for placements, without I/O (cluster views and call outcomes in, actions out).

The way of a placement (epoch N + 1):

                         all its live servers have      every live client reports N + 1,
    something has        loaded their shares            or the timeout is over
    to change   +-----------+            +-----------+            +---------+
    ----------->| candidate |----------->| published |----------->| retired |---> idle: next candidate
                +-----------+  Publish   +-----------+   Retire   +---------+     when due
      Prepare to each    |                     |
      of its servers     | a server of it dies: another candidate, N + 2
                         +                     | an expert lost its last living replica: a candidate at once
                                               +

`_MOVES` has the planner's own phases, and refuses any other move.

Until a client has acknowledged N + 1, servers also hold their shares of N. Any process, including this one,
may therefore die at any step, and each client still has a working placement. Epochs only rise, and servers
refuse an epoch older than one they have received, so a replaced balancer does no harm.

Reasons for a candidate, most urgent first:
  orphans: an expert's last living replica is lost. The expert is loaded elsewhere; nothing else changes.
  repair: a server joined, drains, cannot load for now, or has been dead longer than the grace
    period. A repair starts only when idle.
  partition: a client has been cut from some servers for longer than the grace. The servers that it reaches
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
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
import numpy.typing as npt

from balancer.planner.actions import (
    Action,
    Call,
    Complain,
    Complete,
    Inspect,
    Prepare,
    Publish,
    Retire,
)
from balancer.planner.calls import Calls
from balancer.planner.candidates import Candidate, has_orphans, lacking_without
from balancer.planner.choice import Choice
from balancer.planner.digests import Digests, ExpertDigests
from balancer.planner.layout import Layout
from balancer.planner.pool import EPOCHS_OF_AN_INCARNATION, ServerPool
from eaas.membership.cluster_view import RETURN_GRACE_S
from eaas.types import Member, Placement

__all__ = ["Phase", "Planner"]

# How long a loaded candidate waits for clients to connect to its new servers.
_REACH_S = 5.0


class Phase(Enum):
    """What the planner does with placements."""

    WAITING = auto()
    """Nothing is published: it waits for servers, or for what they hold."""
    LOADING = auto()
    """Servers load the candidate."""
    HELD = auto()
    """The candidate is loaded, and waits for clients to connect to its new servers."""
    PUBLISHED = auto()
    """Clients get the placement; servers drop what it leaves out, then nothing is left to do."""
    GIVEN_UP = auto()
    """A candidate was given up: servers may know a later epoch, and would refuse Retire."""


_MOVES = {
    Phase.WAITING: {Phase.LOADING},
    Phase.LOADING: {Phase.HELD, Phase.PUBLISHED, Phase.GIVEN_UP},
    Phase.HELD: {Phase.PUBLISHED, Phase.GIVEN_UP},
    Phase.PUBLISHED: {Phase.LOADING},
    Phase.GIVEN_UP: {Phase.LOADING},
}


@dataclass(frozen=True, eq=False)
class _Next:
    """The candidate that servers load.

    Attributes:
        placement: The candidate with its epoch.
        plain: The candidate without replicas for partitions.
        willing, holders: Those of its servers that could load, and that had their share, when it was made. It
            is given up once one of them cannot. `holders` includes servers that cannot load more, but hold
            what an older placement gave them.
        is_urgent: It must not be given up for orphans.
    """

    placement: Placement
    plain: Candidate
    willing: frozenset[str]
    holders: frozenset[str]
    is_urgent: bool


class Planner:
    """Makes placements and takes each through its states (see the module's docstring).

    Args:
        expected_servers: Expert servers to wait for before the first placement.
        layout: Lays out placements.
        dead_grace_s: How long to wait for a dead server's return.
        ack_timeout_s: Longest wait for clients that stay on an older placement.

    Raises:
        ValueError: The layout's redundancy is above expected_servers.

    Attributes:
        pool: The view of servers and clients.
        digests: The right digests of the experts' bytes.
        current: The last published placement, which clients use; None before this balancer's first.
        phase: What it does with placements.
    """

    def __init__(
        self,
        expected_servers: int,
        layout: Layout,
        dead_grace_s: float = 30.0,
        ack_timeout_s: float = 10.0,
    ) -> None:
        if layout.redundancy > expected_servers:
            raise ValueError(
                f"redundancy {layout.redundancy} is above expected_servers {expected_servers}"
            )
        self._layout = layout
        self._ack_timeout_s = ack_timeout_s
        self.pool = ServerPool(dead_grace_s)
        self.digests = ExpertDigests()
        self._calls = Calls(self.pool, self.digests)
        self._choice = Choice(expected_servers, self._layout, self.pool, self._calls, self.digests)
        self.phase = Phase.WAITING
        self.current: Placement | None = None
        self._next: _Next | None = None
        # Deadline for clients to connect to the new servers of the candidate that is held.
        self._held_until = 0.0
        self._retire_at = 0.0
        # Whether clients may have had a placement before the current one.
        self._there_was_one = False
        self._layer_order: tuple[int, ...] = ()
        self._last_epoch = 0
        self._complete_epoch = 0
        self._first_seen_at: float | None = None

    # -- events ---------------------------------------------------------------------------------

    def observe(self, members: Mapping[str, Member], now: float) -> list[Action]:
        """Process a new cluster view from the monitor; return the actions due, for `Rollout` to carry out."""
        self.pool.observe(members, now)
        self._layout.know(self.pool.nodes)
        if self._first_seen_at is None:
            self._first_seen_at = now
        return self.tick(now)

    def succeeded(
        self,
        call: Call,
        holds_LE: npt.NDArray[np.bool_] | None = None,
        known_epoch: int = 0,
        digests_LE: Digests | None = None,
    ) -> None:
        """Record a call as carried out by its server; the next `tick` draws the conclusions.

        A tick takes time for every server, and a roll-out has two or three calls for every server, so
        `Rollout` records all that have arrived before it ticks.

        Args:
            call: The call.
            holds_LE: Answer to `Inspect`: experts that the server holds, bool (L, E).
            known_epoch: Answer to `Inspect`: the newest epoch the server has received, loaded or not.
            digests_LE: Answer to `Inspect`: digests of the held experts; None: the server states none.
        """
        self._calls.succeeded(call)
        if isinstance(call, Inspect):
            assert holds_LE is not None
            self._choice.holdings[call.process] = holds_LE
            self._last_epoch = max(self._last_epoch, known_epoch)
            # The digests of a server that does not serve yet were not compared with others.
            member = self.pool.alive.get(call.server_id)
            if digests_LE is not None and member is not None and member.epoch:
                self.digests.state(call.process, digests_LE)
        elif isinstance(call, Prepare):
            self.pool.reset_failures(call.process)

    def loaded(self, call: Prepare, digests_LE: Digests) -> None:
        """Record that a server has loaded its share; once all have, a `tick` sends Prepare with digests.

        Args:
            call: The call.
            digests_LE: Digests of the experts it read; 0 for experts that it does not hold.
        """
        self.digests.state(call.process, digests_LE)
        self._calls.loaded(call)

    def mismatched(self, call: Call, now: float, why: str) -> list[Action]:
        """Give a server no more experts: it reports that an expert's bytes differ from the cluster's."""
        self.pool.mark_damaged(call.process)
        return [Complain(why, refused=call.server_id), *self.tick(now)]

    def failed(self, call: Call, now: float, *, timed_out: bool = False) -> list[Action]:
        """Process a failed call, repeated while `is_wanted`. After too many, its server gets no experts."""
        if not self.is_wanted(call):
            return []
        if isinstance(call, Retire):
            # The server holds more than its share until a retry reaches it, which nothing waits for.
            self._calls.stop_waiting(call)
            return self.tick(now)
        # Before the first placement the failure is not counted, because no other servers can take over.
        if self.current is None and not self._choice.recovering:
            return []
        unable_s = self.pool.count_failure(call.process, now, timed_out=timed_out)
        if not unable_s:
            return []
        self._calls.ask_again({call.process})
        what = "took too long" if timed_out else "failed too often"
        why = f"it {what} to say or load what it holds; it is tried again in {unable_s:.0f} s"
        return [Complain(why, refused=call.server_id), *self.tick(now)]

    def is_wanted(self, call: Call) -> bool:
        """Whether to send a delayed or failed call: its server is alive, its placement still wanted."""
        member = self.pool.alive.get(call.server_id)
        if (
            member is None
            or self.pool.process(member) != call.process
            or self.pool.is_unable(member)
        ):
            return False
        match call:
            case Prepare():
                candidate = self._next and self._next.placement
                return call.placement in (candidate, self.current)
            case Retire():
                return call.placement is self.current and self.phase is Phase.PUBLISHED
            case Inspect():
                return self.current is None

    def tick(self, now: float) -> list[Action]:
        """Begin, drop, publish or retire a placement if due; return the actions. Also called at `wake_at`."""
        self.pool.pass_time(now)
        if self._next is not None and not self._stands(self._next, now):
            self._next = None
            self._move(Phase.GIVEN_UP)
            self._choice.stages.clear()
        actions = self._complete()
        if self._next is None:
            actions += self._next_candidate(now)
        actions += self.pool.complaints(now)
        placement = self._next.placement if self._next else self.current
        if placement is not None:
            self._calls.decide_digests(placement)
            actions += self._calls.prepare(placement, self._layer_order)
        actions += self._publish_if_complete(now)
        actions += self._retire_if_due(now)
        return actions + self._complete()

    def wake_at(self, now: float) -> float | None:
        """Return when `Rollout` must call `tick` even without an event; None: never."""
        times = self.pool.due_at
        if self.phase is Phase.HELD:
            times.append(self._held_until)
        if self.current is None:
            if self._first_seen_at is not None:
                times.append(self._first_seen_at + RETURN_GRACE_S)
        else:
            times += self.pool.grace_ends(self.current.servers)
            if not self._is_idle():
                times.append(self._retire_at)
        return min((t for t in times if t > now), default=None)

    # -- questions ------------------------------------------------------------------------------

    def cordon(self, server_id: str) -> str | None:
        """Mark a live server as leaving, before it is told to drain; or return why it cannot leave."""
        current = self.current
        if current is not None and (lacking := lacking_without(server_id, current, self.pool)):
            return lacking
        if self.pool.cordon(server_id):
            return None
        return (
            f"{server_id} is the last server that can hold experts: "
            "start another one first, or stop the cluster"
        )

    @property
    def fewest_servers(self) -> int:
        """Fewest servers that hold every expert with the wanted redundancy; `Scale` accepts no fewer."""
        return self._layout.redundancy

    def has_time(self, call: Prepare | Retire) -> bool:
        """Whether a call may be delayed: it belongs to a proposal, and no client or expert depends on it."""
        # A server that returned still lacks experts that clients may ask it for.
        returned = isinstance(call, Prepare) and call.placement is self.current
        return self._choice.is_proposed and not returned

    @property
    def is_at_rest(self) -> bool:
        """Whether no placement is being rolled out and no stage is pending: proposals are accepted."""
        return self._is_idle() and not self._choice.stages

    # -- what is asked for ----------------------------------------------------------------------

    def remember(self, wanted: Placement) -> None:
        """Set the last placement the previous balancer wanted; recovery keeps it if its servers are there."""
        self._choice.wanted = wanted

    def propose(self, stages: Sequence[Candidate], epoch: int) -> str | None:
        """Propose another placement, or several in sequence, for the rebalancer or an operator.

        Args:
            stages: The placements, at least one. Servers that cannot be given experts gain none in them.
            epoch: Epoch of the placement that the stages were made from.

        Returns:
            The reason for a refusal; None: accepted, and begun at the next `tick`.
        """
        if self.current is None:
            return "there is no placement yet"
        if self.current.epoch != epoch:
            return f"the placement is of epoch {self.current.epoch} by now, not {epoch}"
        if not self.is_at_rest:
            return "a roll-out is going on"
        return self._choice.propose(stages, self.current)

    def level(self) -> None:
        """Allow repair to even out a placement that was proposed; an operator has set the policy `spread`."""
        self._choice.is_granted = False

    # -- phases ---------------------------------------------------------------------------------

    def _move(self, phase: Phase) -> None:
        assert phase in _MOVES[self.phase], f"{self.phase.name} -> {phase.name}"
        self.phase = phase

    def _next_candidate(self, now: float) -> list[Action]:
        seen_at = self._first_seen_at
        chosen = self._choice.choose(
            self.current,
            now,
            is_new=not self._last_epoch,
            has_waited=seen_at is not None and now >= seen_at + RETURN_GRACE_S,
            is_idle=self._is_idle(),
            gave_up=self.phase is Phase.GIVEN_UP,
        )
        if chosen.candidate is not None:
            self._begin(chosen.candidate, is_urgent=chosen.is_urgent)
        return [*chosen.actions]

    def _begin(self, plain: Candidate, *, is_urgent: bool) -> None:
        candidate, pool = self._choice.for_partitions(plain), self.pool
        own = EPOCHS_OF_AN_INCARNATION * (pool.balancer_incarnation - 1)
        wanted = self._choice.wanted.epoch if self._choice.wanted else 0
        self._last_epoch = 1 + max(self._last_epoch, pool.highest_epoch, own, wanted)
        shares_LSE = candidate.shares_LSE.astype(np.float32)
        servers = frozenset(candidate.servers)
        self._next = _Next(
            Placement(self._last_epoch, candidate.servers, candidate.holds_LSE, shares_LSE),
            plain,
            servers & pool.willing.keys(),
            servers & pool.holders.keys(),
            is_urgent,
        )
        self._layer_order = candidate.layer_order
        self._move(Phase.LOADING)

    def _stands(self, candidate: _Next, now: float) -> bool:
        """Whether a candidate's servers live, can load and are reached; else `tick` gives it up."""
        if self.phase is Phase.HELD and now >= self._held_until:
            return False
        pool, current = self.pool, self.current
        if current is None and pool.highest_epoch > candidate.placement.epoch:
            # After a late call of the previous balancer, its servers refuse this candidate.
            return False
        if current is not None and not candidate.is_urgent and has_orphans(current, pool):
            # Give this candidate up: orphans must not wait for its loads.
            return False
        return pool.willing.keys() >= candidate.willing and pool.holders.keys() >= candidate.holders

    def _publish_if_complete(self, now: float) -> list[Action]:
        if self._next is None or not self._calls.is_prepared(self._next.placement):
            return []
        placement = self._next.placement
        if self.current is not None and self.pool.has_unreached(placement):
            # Since the candidate was made, a client has joined, or has lost its connection to a new server.
            if self.phase is Phase.LOADING:
                self._held_until = now + _REACH_S
                self._move(Phase.HELD)
            return []
        self._move(Phase.PUBLISHED)
        self.pool.place(placement)
        self._there_was_one = self.current is not None or self._choice.recovering
        self._choice.plain = self._next.plain
        self.current, self._next = placement, None
        self._retire_at = now + self._ack_timeout_s
        self._choice.holdings.clear()
        self._calls.keep(placement.epoch)
        return [Publish(placement)]

    def _retire_if_due(self, now: float) -> list[Action]:
        """Return the Retire calls due: none during a candidate, whose servers refuse the older epoch."""
        placement = self.current
        if placement is None or self.phase is not Phase.PUBLISHED:
            return []
        if now < self._retire_at and self.pool.clients_behind(placement.epoch, self._there_was_one):
            return []
        return self._calls.retire(placement)

    def _is_idle(self) -> bool:
        """Whether servers hold nothing but the published placement, or do not answer Retire."""
        placement = self.current
        return placement is not None and self._next is None and self._calls.is_retired(placement)

    def _complete(self) -> list[Action]:
        placement = self.current
        if placement is None or self._complete_epoch == placement.epoch or not self._is_idle():
            return []
        self._complete_epoch = placement.epoch
        return [Complete(placement)]
