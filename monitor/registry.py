"""Who is in the cluster: a state machine without I/O and without a clock.

Every method takes `now` (monotonic seconds) and returns the events that it caused, so the same code
runs live and in simulation.

    register                          a reason          tick: silent for a lease
  ----------> JOINING/SERVING/DRAINING ----------> SUSPECT ----------> DEAD (kept as a tombstone)
             |    ^                  none is left     |                  |
             |    +-----------------------------------+                  |
             |    +------------------------------------------------------+
             v    |             register: incarnation + 1
            LEFT -+                        DEAD, LEFT -- tick: after FORGET_S --> forgotten

Reasons to suspect a member: it is late (`monitor.detector`); an expert server's work does not move
(`monitor.progress`), or its clients accuse it (`monitor.outcomes`). It is what it reports again when none
holds. A member is DEAD when its lease ends or its parent saw it end, and LEFT after a goodbye.

Terms:
  life: what lies between a registration and DEAD; named by (id, incarnation).
  lease: silence that ends a life. Only `tick` ends one, so that heartbeats which wait in the monitor's
    own queue after a pause are heard first.
  tombstone: a member that is DEAD or LEFT, kept for a time so that people see it. Its incarnation is never
    given again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from eaas.membership import RETURN_GRACE_S
from eaas.message_ranges import TRUSTED_EPOCH
from eaas.types import Member, MemberState, Role, ServerReach
from monitor.detector import Arrivals, Detector
from monitor.life import Life, MemberEvent
from monitor.outcomes import OutcomeBook, Said
from monitor.progress import Progress
from monitor.store.kept import Kept

__all__ = ["IdTakenError", "Registry", "UnknownLifeError"]

_MAX_TOMBSTONES = 64
# Seconds until a tombstone is forgotten. The cluster misses nothing when a member said goodbye, and nothing
# for long when an attention client died; operators look for a server that died, but not for ever.
_FORGET_LEFT_S = 60.0
_FORGET_DEAD_CLIENT_S = 600.0
_FORGET_DEAD_S = 86_400.0
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
        heartbeat_s: What members are told to send a heartbeat at.
        now: Monotonic seconds. It never falls from call to call.
        kept: What a former monitor knew. Its members have time to find this one, and a lease from then on.
    """

    def __init__(
        self, lease_s: float, heartbeat_s: float, now: float, kept: Kept | None = None
    ) -> None:
        self._lease_s = lease_s
        grace_s = 0.0 if kept is None else max(0.0, RETURN_GRACE_S - lease_s)
        self._detector = Detector(lease_s, heartbeat_s, now, grace_s)
        self._live: dict[str, Life] = {}
        self._tombstones: dict[str, Life] = {}
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
        for event in kept.events:
            member = event.member
            arrivals = self._watch(member, now)
            life = Life(member, member.state, arrivals, Progress(self._lease_s, 0, 0))
            if member.state.is_gone:
                self._detector.forget(member.id)
                life.forget_at = now + _forget_s(member)
                self._tombstones[member.id] = life
            else:
                # Of whomever was suspected the next heartbeat says what it is.
                arrivals.late = member.state is MemberState.SUSPECT
                self._live[member.id] = life

    def _watch(self, member: Member, now: float) -> Arrivals:
        # A monitor is heard by itself, whatever is wrong with its network.
        return self._detector.watch(member.id, now, witness=member.role is not Role.MONITOR)

    @property
    def forgotten_incarnation(self) -> int:
        """The highest incarnation among the tombstones that had to be forgotten."""
        return self._forgotten_incarnation

    def knows(self, member_id: str) -> bool:
        """Whether there is a member of this id, be it a tombstone."""
        return member_id in self._live or member_id in self._tombstones

    @property
    def revision(self) -> int:
        """Revision of the last event."""
        return self._revision

    def members(self, now: float) -> tuple[Member, ...]:
        """Everybody, tombstones included, with loads and `silence_s` filled in."""
        lives = (*self._live.values(), *self._tombstones.values())
        return tuple(life.full(now - life.arrivals.heard_at) for life in lives)

    def since(self, revision: int) -> Sequence[MemberEvent] | None:
        """The events after `revision`, in order.

        None where they are not (all) kept: take a snapshot.
        """
        missed = self._revision - revision
        if not 0 <= missed <= len(self._history):
            return None
        return tuple(self._history)[len(self._history) - missed :]

    def register(
        self,
        member: Member,
        previous_incarnation: int,
        now: float,
        ended_pids: Collection[int] = (),
    ) -> tuple[int, list[MemberEvent]]:
        """Begins a life, or goes on with one that is still known; returns its incarnation.

        Args:
            member: As the process describes itself; `incarnation` is ignored.
            previous_incarnation: What a process that lives on was given before, else 0.
            now: Monotonic seconds.
            ended_pids: Of processes that had this id on this host, or were to, and were seen to end.

        Raises:
            ValueError: The member has no id, or reports a state that only the monitor may give.
            IdTakenError: A live process with another pid holds the id.
        """
        if not member.id:
            raise ValueError("a member needs an id")
        _require_own_state(member.id, member.state)
        ended = self._end_seen(member, previous_incarnation, ended_pids, now)
        incarnation, reason = self._incarnation_of(member, previous_incarnation)
        before = self._live.get(member.id)
        self._tombstones.pop(member.id, None)
        shown = None if before is None else before.member
        if before is not None and before.member.incarnation == incarnation:
            life = before
            life.reported = member.state
            if member.reach is not None:
                # The heartbeats say what it is.
                member = replace(member, reach=life.member.reach or ())
            self._detector.heard(member.id, now)
        else:
            self._outcomes.forget(member.id)
            progress = Progress(self._lease_s, member.progress, member.in_flight)
            life = Life(member, member.state, self._watch(member, now), progress)
        life.member = replace(
            member,
            state=life.state,
            incarnation=incarnation,
            progress=0,
            in_flight=0,
            silence_s=0.0,
        )
        self._live[member.id] = life
        if shown == life.member:
            return incarnation, ended
        return incarnation, [*ended, self._event(life, reason)]

    def _end_seen(
        self, member: Member, previous: int, ended_pids: Collection[int], now: float
    ) -> list[MemberEvent]:
        """The end of the life whose process the parent of `member` saw end, where that life is known."""
        known = self._live.get(member.id)
        # Whoever was registered before speaks of itself: a lease that it has is its own.
        if known is None or previous:
            return []
        if known.member.pid not in ended_pids or known.member.host != member.host:
            return []
        return self._bury(known, MemberState.DEAD, "its parent saw it end", now)

    def _incarnation_of(self, member: Member, previous: int) -> tuple[int, str]:
        if known := self._live.get(member.id):
            same_process = (known.member.pid, known.member.host) == (member.pid, member.host)
            if same_process and previous == known.member.incarnation:
                return previous, "registered again"
            if not same_process and not known.arrivals.late:
                raise IdTakenError(
                    f"{member.id} is process {known.member.pid} on {known.member.host}, "
                    f"which lives: give this process another id"
                )
            return max(previous, known.member.incarnation) + 1, "replaces its former life"
        # Incarnations are counted on from what members claim, and must never run out.
        if previous > TRUSTED_EPOCH:
            previous = 0
        if tombstone := self._tombstones.get(member.id):
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
        stalled_s: float = 0.0,
        busy_s: float = 0.0,
        reach: tuple[ServerReach, ...] | None = None,
    ) -> list[MemberEvent]:
        """Renews the lease and takes what the member says of itself (fields: `Member`, `monitor.proto`).

        Raises:
            ValueError: The reported state is one that only the monitor may give, or a member that is no
                attention client reports a reach.
            UnknownLifeError: No live member has this id and incarnation.
        """
        _require_own_state(member_id, state)
        life = self._life(member_id, incarnation)
        if reach is None:
            reach = life.member.reach
        elif life.member.role is not Role.ATTENTION_CLIENT:
            raise ValueError(f"{member_id} is no attention client: it reaches no expert server")
        was_late, was_stuck = life.arrivals.late, life.progress.stuck
        self._detector.heard(member_id, now)
        life.reported, life.busy_s = state, busy_s
        if life.member.role is Role.EXPERT_SERVER:
            life.progress.reported(progress, in_flight, stalled_s, now)
        else:
            life.progress.count, life.progress.in_flight = progress, in_flight
        shown = life.member
        said = life.state, experts, epoch, reach
        if (shown.state, shown.experts, shown.epoch, shown.reach) == said:
            return []
        life.member = replace(shown, state=life.state, experts=experts, epoch=epoch, reach=reach)
        reason = "reported"
        if life.progress.stuck and shown.state is not MemberState.SUSPECT:
            reason = life.progress.stuck
        elif was_stuck and not life.progress.stuck:
            reason = "its work moves again"
        elif was_late:
            reason = "heard again"
        return [self._event(life, reason)]

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
                if not self._detector.paused_s(now):
                    events += self._judge(life, now)
        return events

    def require(self, member_id: str, incarnation: int) -> Member:
        """The member, if this life of it is registered. Raises UnknownLifeError."""
        return self._life(member_id, incarnation).member

    def living(self, member_id: str) -> Member | None:
        """The member as it is now; None where none of that id lives."""
        life = self._live.get(member_id)
        return None if life is None else life.member

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
        return [self._event(life, life.accusation or "its clients complain no more")]

    def deregister(
        self, member_id: str, incarnation: int, reason: str, now: float
    ) -> list[MemberEvent]:
        """A goodbye: LEFT at once. One that is not known (any more) is no error."""
        life = self._live.get(member_id)
        if life is None or life.member.incarnation != incarnation:
            return []
        return self._bury(life, MemberState.LEFT, reason or "said goodbye", now)

    @property
    def doubt(self) -> str | None:
        """Why the last tick declared nobody dead though leases may have ended, for people."""
        return self._detector.doubt

    def due_at(self) -> float:
        """When the next lease ends, if nobody is heard until then; inf where there are no members."""
        return self._detector.due_at()

    def tick(self, now: float) -> list[MemberEvent]:
        """Time passes: silence makes members SUSPECT, then DEAD; what clients say makes servers SUSPECT, or
        clears them; tombstones are forgotten.

        Call it each lease/8, and at `due_at`.
        """
        if paused_s := self._detector.paused_s(now):
            self._outcomes.skip(paused_s)
        silence = self._detector.tick(now)
        events = []
        for member_id in silence.late:
            life = self._live[member_id]
            if life.member.state is not life.state:
                life.member = replace(life.member, state=life.state)
                reason = f"silent for {now - life.arrivals.heard_at:.1f} s"
                events.append(self._event(life, reason))
        for member_id in silence.lapsed:
            life = self._live[member_id]
            reason = f"lease ended: silent for {now - life.arrivals.heard_at:.1f} s"
            events += self._bury(life, MemberState.DEAD, reason, now)
        for member_id in self._outcomes.open_cases():
            events += self._judge(self._live[member_id], now)
        for life in [t for t in self._tombstones.values() if now >= t.forget_at]:
            events.append(self._forget(life))
        return events

    def _bury(self, life: Life, state: MemberState, reason: str, now: float) -> list[MemberEvent]:
        """The end of a life; state: DEAD or LEFT. One tombstone too many is forgotten."""
        member_id = life.member.id
        life.member = replace(life.member, state=state)
        life.progress.in_flight = 0
        life.forget_at = now + _forget_s(life.member)
        del self._live[member_id]
        self._detector.forget(member_id)
        self._outcomes.forget(member_id)
        events = [self._event(life, reason)]
        if len(self._tombstones) == _MAX_TOMBSTONES:
            events.append(self._forget(min(self._tombstones.values(), key=lambda t: t.forget_at)))
        self._tombstones[member_id] = life
        return events

    def _forget(self, tombstone: Life) -> MemberEvent:
        member = tombstone.member
        del self._tombstones[member.id]
        self._forgotten_incarnation = max(self._forgotten_incarnation, member.incarnation)
        return self._event(tombstone, "is no longer listed", forgotten=True)

    def _event(self, life: Life, reason: str, *, forgotten: bool = False) -> MemberEvent:
        self._revision += 1
        event = MemberEvent(self._revision, life.full(0.0), reason, forgotten)
        self._history.append(event)
        return event


def _require_own_state(member_id: str, state: MemberState) -> None:
    """Raises ValueError for a state that only the monitor gives."""
    if state is MemberState.SUSPECT or state.is_gone:
        raise ValueError(f"{member_id}: a member does not report {state.value} of itself")


def _forget_s(member: Member) -> float:
    """Seconds that a tombstone is kept."""
    if member.state is MemberState.LEFT:
        return _FORGET_LEFT_S
    if member.role is Role.ATTENTION_CLIENT:
        return _FORGET_DEAD_CLIENT_S
    return _FORGET_DEAD_S
