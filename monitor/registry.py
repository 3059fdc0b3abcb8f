"""Who is in the cluster: a state machine without I/O and without a clock.

Every method takes `now` (monotonic seconds) and returns the events that it caused, so the same code
runs live and in simulation.

    register                    tick: silent for 3/4 of a lease   tick: silent for a lease
  ----------> JOINING/SERVING/DRAINING ----------> SUSPECT ----------> DEAD (kept as a tombstone)
                  ^                 heartbeat         |                  |
                  +-----------------------------------+                  | register: incarnation + 1
                  +------------------------------------------------------+

An expert server is SUSPECT, too, while clients accuse it (`monitor.outcomes`), and what it reports again when
neither holds. Silence alone makes anybody DEAD.

Terms:
  life: what lies between a registration and DEAD; named by (id, incarnation).
  lease: silence that ends a life. Only `tick` ends one, so that heartbeats which wait in the monitor's
    own queue after a pause are heard first.
  tombstone: a DEAD member, kept so that people see it and so that its incarnation is not given again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from eaas.membership import RETURN_GRACE_S
from eaas.types import Member, MemberState, Role
from monitor.life import Life, MemberEvent, visible
from monitor.outcomes import OutcomeBook, Said
from monitor.store.kept import Kept

__all__ = ["IdTakenError", "Registry", "UnknownLifeError"]

# Of a lease. A heartbeat may come late by a whole period before anybody is suspected.
_SUSPECT_SHARE = 0.75

_MAX_TOMBSTONES = 64
_MAX_HISTORY = 1024


class IdTakenError(Exception):
    """The id belongs to another process that lives.

    Choose another id, or wait until that one is gone.
    """


class UnknownLifeError(Exception):
    """The member is not known by this incarnation (any more). Register again."""


class Registry:
    """The members and the last events (see the module's head).

    Args:
        lease_s: Seconds of silence that end a life.
        now: Monotonic seconds.
        kept: What a former monitor knew. Its members have time to find this one, and a lease from then on.
    """

    def __init__(self, lease_s: float, now: float, kept: Kept | None = None) -> None:
        self._lease_s = lease_s
        self._ticked_at = now
        self._live: dict[str, Life] = {}
        self._dead: dict[str, Life] = {}  # In the order of their deaths.
        self._outcomes = OutcomeBook(lease_s)
        self._history: deque[MemberEvent] = deque(maxlen=_MAX_HISTORY)
        self._revision = 0
        # The highest incarnation among the tombstones that had to be forgotten.
        self._forgotten_incarnation = 0
        if kept is not None:
            self._restore(kept, now)

    def _restore(self, kept: Kept, now: float) -> None:
        self._revision = kept.revision
        self._forgotten_incarnation = kept.forgotten_incarnation
        lease_from = now + max(0.0, RETURN_GRACE_S - self._lease_s)
        for event in kept.events:
            member = event.member
            life = Life(member, member.state, heard_at=now, lease_from=lease_from)
            if member.state is MemberState.DEAD:
                self._dead[member.id] = life
            else:
                # Of whomever was suspected the next heartbeat says what it is.
                life.silent = member.state is MemberState.SUSPECT
                self._live[member.id] = life

    @property
    def forgotten_incarnation(self) -> int:
        """The highest incarnation among the tombstones that had to be forgotten."""
        return self._forgotten_incarnation

    def knows(self, member_id: str) -> bool:
        """Whether there is a member of this id, be it a tombstone."""
        return member_id in self._live or member_id in self._dead

    @property
    def revision(self) -> int:
        """Revision of the last event."""
        return self._revision

    def members(self, now: float) -> tuple[Member, ...]:
        """Everybody, tombstones included, with `silence_s` filled in."""
        lives = (*self._live.values(), *self._dead.values())
        return tuple(replace(life.member, silence_s=now - life.heard_at) for life in lives)

    def since(self, revision: int) -> Sequence[MemberEvent] | None:
        """The events after `revision`, in order.

        None where they are not (all) kept: take a snapshot.
        """
        missed = self._revision - revision
        if not 0 <= missed <= len(self._history):
            return None
        return tuple(self._history)[len(self._history) - missed :]

    def register(
        self, member: Member, previous_incarnation: int, now: float
    ) -> tuple[int, list[MemberEvent]]:
        """Begins a life, or goes on with one that is still known; returns its incarnation.

        Args:
            member: As the process describes itself; `incarnation` is ignored.
            previous_incarnation: What a process that lives on was given before, else 0.
            now: Monotonic seconds.

        Raises:
            ValueError: The member has no id, or reports a state that only the monitor may give.
            IdTakenError: A live process with another pid holds the id.
        """
        if not member.id:
            raise ValueError("a member needs an id")
        if member.state in (MemberState.SUSPECT, MemberState.DEAD):
            raise ValueError(
                f"{member.id}: a member does not report {member.state.value} of itself"
            )
        incarnation, reason = self._incarnation_of(member, previous_incarnation)
        before = self._live.get(member.id)
        self._dead.pop(member.id, None)
        life = Life(member, member.state, heard_at=now, lease_from=now)
        if before is not None and before.member.incarnation == incarnation:
            life.accusation = before.accusation
        else:
            self._outcomes.forget(member.id)
        life.member = replace(member, state=life.state, incarnation=incarnation, silence_s=0.0)
        self._live[member.id] = life
        if before is not None and visible(before.member) == visible(life.member):
            return incarnation, []
        return incarnation, [self._event(life.member, reason)]

    def _incarnation_of(self, member: Member, previous: int) -> tuple[int, str]:
        if known := self._live.get(member.id):
            same_process = (known.member.pid, known.member.host) == (member.pid, member.host)
            if same_process and previous == known.member.incarnation:
                return previous, "registered again"
            if not same_process and not known.silent:
                raise IdTakenError(
                    f"{member.id} is process {known.member.pid} on {known.member.host}, "
                    f"which lives: give this process another id"
                )
            return max(previous, known.member.incarnation) + 1, "replaces its former life"
        if tombstone := self._dead.get(member.id):
            return max(previous, tombstone.member.incarnation) + 1, "back with a new life"
        if previous > self._forgotten_incarnation:
            return previous, "known before this monitor started"
        return self._forgotten_incarnation + 1, "registered"

    def heartbeat(
        self,
        member_id: str,
        incarnation: int,
        now: float,
        *,
        state: MemberState,
        progress: int = 0,
        in_flight: int = 0,
        experts: int = 0,
        epoch: int = 0,
    ) -> list[MemberEvent]:
        """Renews the lease and takes what the member says of itself (fields: `Member`).

        Raises:
            ValueError: The reported state is one that only the monitor may give.
            UnknownLifeError: No live member has this id and incarnation.
        """
        if state in (MemberState.SUSPECT, MemberState.DEAD):
            raise ValueError(f"{member_id}: a member does not report {state.value} of itself")
        life = self._life(member_id, incarnation)
        before, heard_again = life.member, life.silent
        life.heard_at = life.lease_from = now
        life.reported, life.silent = state, False
        life.member = replace(
            before,
            state=life.state,
            progress=progress,
            in_flight=in_flight,
            experts=experts,
            epoch=epoch,
        )
        if visible(before) == visible(life.member):
            return []
        return [self._event(life.member, "heard again" if heard_again else "reported")]

    def report_outcomes(
        self,
        client_id: str,
        incarnation: int,
        about: Iterable[tuple[str, int, Said]],
        now: float,
    ) -> list[MemberEvent]:
        """Takes what an attention client says of servers: (id, incarnation, totals) of each.

        Of servers, or lives of servers, that are not known nothing is kept.

        Raises:
            ValueError: It is no attention client.
            UnknownLifeError: No live member has this id and incarnation.
        """
        client = self._life(client_id, incarnation)
        if client.member.role is not Role.ATTENTION_CLIENT:
            raise ValueError(f"{client_id} is no attention client: it asks no expert server")
        events = []
        for server_id, server_incarnation, said in about:
            life = self._live.get(server_id)
            if (
                life is not None
                and life.member.incarnation == server_incarnation
                and life.member.role is Role.EXPERT_SERVER
            ):
                self._outcomes.take(server_id, client_id, said, now)
                if not self._paused(now):
                    events += self._judge(life, now)
        return events

    def _life(self, member_id: str, incarnation: int) -> Life:
        life = self._live.get(member_id)
        if life is None or life.member.incarnation != incarnation:
            raise UnknownLifeError(
                f"{member_id}, incarnation {incarnation}, is not known: register"
            )
        return life

    def _judge(self, life: Life, now: float) -> list[MemberEvent]:
        """Lets what clients say of a member have its effect."""
        life.accusation = self._outcomes.accusation(life.member.id, now)
        if life.member.state is life.state:
            return []
        life.member = replace(life.member, state=life.state)
        return [self._event(life.member, life.accusation or "its clients complain no more")]

    def deregister(self, member_id: str, incarnation: int, reason: str) -> list[MemberEvent]:
        """A goodbye: DEAD at once. One that is not known (any more) is no error."""
        life = self._live.get(member_id)
        if life is None or life.member.incarnation != incarnation:
            return []
        return [self._bury(life, reason or "said goodbye")]

    def tick(self, now: float) -> list[MemberEvent]:
        """Time passes: silence makes members SUSPECT, then DEAD. Call it every lease/8 or so.

        What clients say makes servers SUSPECT, or clears them.

        A gap of more than half a lease between two ticks means that this process itself was paused,
        and its members' silence proves nothing: every lease starts anew.
        """
        paused = self._paused(now)
        gap_s, self._ticked_at = now - self._ticked_at, now
        if paused:
            self._outcomes.skip(gap_s)
            for life in self._live.values():
                life.lease_from = max(life.lease_from, now)
            return []
        events = []
        for life in tuple(self._live.values()):
            silence_s = now - life.lease_from
            if silence_s >= self._lease_s:
                reason = f"lease ended: silent for {now - life.heard_at:.1f} s"
                events.append(self._bury(life, reason))
                continue
            if silence_s >= _SUSPECT_SHARE * self._lease_s and not life.silent:
                life.silent = True
                if life.member.state is not life.state:
                    life.member = replace(life.member, state=life.state)
                    reason = f"silent for {now - life.heard_at:.1f} s"
                    events.append(self._event(life.member, reason))
            events += self._judge(life, now)
        return events

    def _paused(self, now: float) -> bool:
        """Whether this process itself was paused since the last tick."""
        return now - self._ticked_at > self._lease_s / 2

    def _bury(self, life: Life, reason: str) -> MemberEvent:
        life.member = replace(life.member, state=MemberState.DEAD, in_flight=0)
        del self._live[life.member.id]
        self._outcomes.forget(life.member.id)
        self._dead[life.member.id] = life
        if len(self._dead) > _MAX_TOMBSTONES:
            oldest = self._dead.pop(next(iter(self._dead)))
            self._forgotten_incarnation = max(
                self._forgotten_incarnation, oldest.member.incarnation
            )
        return self._event(life.member, reason)

    def _event(self, member: Member, reason: str) -> MemberEvent:
        self._revision += 1
        event = MemberEvent(self._revision, member, reason)
        self._history.append(event)
        return event
