"""Membership registry in the monitor process: decides who is a member, in which state (no I/O, no clock).

Every method takes `now` (monotonic seconds) and returns the events it caused, so the same code runs live and
in simulation.

    register                        a suspicion         tick: silent for a lease
  ----------> JOINING/SERVING/DRAINING ----------> SUSPECT ----------> DEAD (kept as a tombstone)
             |    ^                  none is left     |                  |
             |    +-----------------------------------+                  |
             |    +------------------------------------------------------+
             v    |             register: incarnation + 1
            LEFT -+                        DEAD, LEFT -- tick: after FORGET_S --> forgotten

Reasons for suspicion, all in `monitor.failure_detection`: a member's heartbeat is late (`detector`), an
expert server makes no progress (`progress`), or its clients report failures (`failure_reports`). When no
reason is left, the member returns to the state that it reports. A member is DEAD when its lease ends or its
parent saw its process end, and LEFT when it deregisters.

Terms:
  incarnation: the time from a registration to DEAD or LEFT; named by (id, number).
  lease: the silence that ends an incarnation. Only `tick` ends a lease, so heartbeats that queued up while
    the monitor was paused are heard first.
  tombstone: a DEAD or LEFT member, kept for a time so that people see it. Its incarnation is never given
    again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import islice

from eaas.membership.cluster_view import RETURN_GRACE_S
from eaas.net.message_ranges import TRUSTED_EPOCH
from eaas.types import Member, MemberState, Role, ServerReach
from monitor.failure_detection.detector import Arrivals, Detector
from monitor.failure_detection.failure_reports import FailureReports, RequestTotals
from monitor.failure_detection.progress import Progress
from monitor.incarnation import MemberEntry, MemberEvent
from monitor.store.kept import Kept

__all__ = ["IdTakenError", "Registry", "UnknownIncarnationError"]

_MAX_TOMBSTONES = 64
# Seconds until a tombstone is forgotten. A LEFT member is soon uninteresting, as is a dead attention client.
# Operators look longer for a dead server, but not for ever.
_FORGET_LEFT_S = 60.0
_FORGET_DEAD_CLIENT_S = 600.0
_FORGET_DEAD_S = 86_400.0
_MAX_HISTORY = 1024
# Members that become SUSPECT, and members that become DEAD, in one tick; the next tick comes soon. Thousands
# at once would keep the monitor from hearing the others.
_MOST_IN_A_TICK = 200


class IdTakenError(Exception):
    """The id belongs to another live process.

    Choose another id, or wait until that process has ended.
    """


class UnknownIncarnationError(Exception):
    """No live member has this id and incarnation. The member should register again."""


class Registry:
    """The cluster's members and the last events; each method takes the time and returns new events.

    Args:
        lease_s: Seconds of silence that end an incarnation.
        heartbeat_s: The members' heartbeat interval.
        now: Monotonic seconds. It never falls from call to call.
        kept: State that a former monitor stored. Its members have time to find this monitor, and a lease from
            then on.
    """

    def __init__(
        self, lease_s: float, heartbeat_s: float, now: float, kept: Kept | None = None
    ) -> None:
        self._lease_s = lease_s
        grace_s = 0.0 if kept is None else max(0.0, RETURN_GRACE_S - lease_s)
        self._detector = Detector(lease_s, heartbeat_s, now, grace_s)
        self._live: dict[str, MemberEntry] = {}
        self._tombstones: dict[str, MemberEntry] = {}
        self._reports = FailureReports(lease_s)
        self._history: deque[MemberEvent] = deque(maxlen=_MAX_HISTORY)
        self._revision = 0
        # Late members that have not become SUSPECT yet, and whether the last tick has left work.
        self._late: deque[str] = deque()
        self._behind = False
        # Highest incarnation of all forgotten tombstones, so that none is given again.
        self._forgotten_incarnation = 0
        if kept is not None:
            self._restore(kept, now)

    def _restore(self, kept: Kept, now: float) -> None:
        self._revision = kept.revision
        self._forgotten_incarnation = kept.forgotten_incarnation
        for event in kept.events:
            member = event.member
            arrivals = self._watch(member, now)
            entry = MemberEntry(member, member.state, arrivals, Progress(self._lease_s, 0, 0))
            if member.state.is_gone:
                self._detector.forget(member.id)
                entry.forget_at = now + _forget_s(member)
                self._tombstones[member.id] = entry
            else:
                # The next heartbeat clears or confirms the suspicion.
                arrivals.late = member.state is MemberState.SUSPECT
                self._live[member.id] = entry

    def _watch(self, member: Member, now: float) -> Arrivals:
        # The monitor hears itself even when its network fails.
        return self._detector.watch(member.id, now, remote=member.role is not Role.MONITOR)

    @property
    def forgotten_incarnation(self) -> int:
        """The highest incarnation of all forgotten tombstones; stored, so that none is given again."""
        return self._forgotten_incarnation

    def knows(self, member_id: str) -> bool:
        """Whether the registry lists this id, tombstones included; the store deletes ids that it does not."""
        return member_id in self._live or member_id in self._tombstones

    @property
    def revision(self) -> int:
        """Revision of the last membership event; rises by 1 with each, so watchers can resume from it."""
        return self._revision

    def members(self, now: float) -> tuple[Member, ...]:
        """All members and tombstones, with current loads and `silence_s`."""
        entries = (*self._live.values(), *self._tombstones.values())
        return tuple(entry.full(now - entry.arrivals.heard_at) for entry in entries)

    def capture(self) -> tuple[tuple[Member, ...], tuple[MemberEntry, ...]]:
        """All members and tombstones at the current revision, without their counters, and their entries.

        Takes a millisecond for ten thousand members. The members do not change, the entries do.
        """
        entries = (*self._live.values(), *self._tombstones.values())
        return tuple([entry.member for entry in entries]), entries

    def changed_since(self, revision: int) -> list[Member]:
        """Return the members and tombstones with an event after `revision`, without their counters.

        For the store writer, when `since` no longer has these events.
        """
        return [entry.member for entry in self.capture()[1] if entry.revision > revision]

    def has_others(self, member_id: str) -> bool:
        """Whether a member other than this one is live; the monitor stops once no other is."""
        return len(self._live) > (member_id in self._live)

    def since(self, revision: int) -> Sequence[MemberEvent] | None:
        """Return the membership events after `revision`, in order, for a watcher or the store writer.

        Returns None if some are no longer kept; send a snapshot instead.
        """
        missed = self._revision - revision
        if not 0 <= missed <= len(self._history):
            return None
        # Usually few: each watcher asks after each event.
        return tuple(islice(reversed(self._history), missed))[::-1]

    def register(
        self,
        member: Member,
        previous_incarnation: int,
        now: float,
        ended_pids: Collection[int] = (),
        session: int = 0,
    ) -> tuple[int, list[MemberEvent]]:
        """Register a member: begin an incarnation, or continue a live one. Returns its number and the events.

        Args:
            member: As the process describes itself; `incarnation` is ignored.
            previous_incarnation: The former incarnation of a process that lives on, else 0.
            now: Monotonic seconds.
            ended_pids: Pids of earlier processes of this id on this host that their parent saw end.
            session: Random number of the process, which its pid alone does not name: in a container that
                starts again, the pid is the same. 0: unknown.

        Raises:
            ValueError: The member has no id, or reports a state that only the monitor sets.
            IdTakenError: A live process with another pid holds the id.
        """
        if not member.id:
            raise ValueError("a member needs an id")
        _require_own_state(member.id, member.state)
        known = self._live.get(member.id)
        if known is not None and session and known.session == session:
            # The answer to its last registration was lost, so it does not know its incarnation.
            previous_incarnation = known.member.incarnation
        ended = self._end_former(member, previous_incarnation, ended_pids, now)
        incarnation, reason = self._incarnation_of(member, previous_incarnation)
        before = self._live.get(member.id)
        self._tombstones.pop(member.id, None)
        shown = None if before is None else before.member
        if before is not None and before.member.incarnation == incarnation:
            entry = before
            entry.reported = member.state
            if member.reach is not None:
                # The reach comes with heartbeats.
                member = replace(member, reach=entry.member.reach or ())
            self._detector.heard(member.id, now)
        else:
            self._reports.forget(member.id)
            progress = Progress(self._lease_s, member.progress, member.in_flight)
            arrivals = self._watch(member, now)
            entry = MemberEntry(member, member.state, arrivals, progress, session)
        entry.member = replace(
            member,
            state=entry.state,
            incarnation=incarnation,
            progress=0,
            in_flight=0,
            silence_s=0.0,
        )
        self._live[member.id] = entry
        if shown == entry.member:
            return incarnation, ended
        return incarnation, [*ended, self._event(entry, reason)]

    def _end_former(
        self, member: Member, previous: int, ended_pids: Collection[int], now: float
    ) -> list[MemberEvent]:
        """End the former incarnation of a registering member if the parent process saw it end."""
        known = self._live.get(member.id)
        # With a `previous` incarnation, the process itself held it and has not ended.
        if known is None or previous:
            return []
        if known.member.pid not in ended_pids or known.member.host != member.host:
            return []
        return self._end(known, MemberState.DEAD, "its parent saw it end", now)

    def _incarnation_of(self, member: Member, previous: int) -> tuple[int, str]:
        if known := self._live.get(member.id):
            same_process = (known.member.pid, known.member.host) == (member.pid, member.host)
            if same_process and previous == known.member.incarnation:
                return previous, "registered again"
            if not same_process and not known.arrivals.late:
                raise IdTakenError(
                    f"{member.id} is process {known.member.pid} on {known.member.host}, "
                    "which is alive: give this process another id"
                )
            return max(previous, known.member.incarnation) + 1, "replaces its former incarnation"
        # Members claim these numbers, and new numbers continue from them, so they must never run out.
        if previous > TRUSTED_EPOCH:
            previous = 0
        if tombstone := self._tombstones.get(member.id):
            return max(previous, tombstone.member.incarnation) + 1, "back with a new incarnation"
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
        loading_bytes: int = 0,
        loaded_bytes: int = 0,
        reach: tuple[ServerReach, ...] | None = None,
    ) -> list[MemberEvent]:
        """Renew a member's lease, which ends a suspicion that it is late, and record its report.

        Fields: `Member` and `monitor.proto`. An expert server whose work is stuck becomes SUSPECT. Returns an
        event only if state, experts, epoch or reach changed.

        Raises:
            ValueError: The reported state is one that only the monitor sets, or a member other than an
                attention client reports a reach.
            UnknownIncarnationError: No live member has this id and incarnation.
        """
        _require_own_state(member_id, state)
        entry = self._entry(member_id, incarnation)
        if reach is None:
            reach = entry.member.reach
        elif entry.member.role is not Role.ATTENTION_CLIENT:
            raise ValueError(
                f"{member_id} is not an attention client: it has no expert servers to reach"
            )
        was_late, was_stuck = entry.arrivals.late, entry.progress.stuck
        self._detector.heard(member_id, now)
        entry.reported, entry.busy_s = state, busy_s
        entry.loading_bytes, entry.loaded_bytes = loading_bytes, loaded_bytes
        if entry.member.role is Role.EXPERT_SERVER:
            entry.progress.reported(progress, in_flight, stalled_s, now)
        else:
            entry.progress.count, entry.progress.in_flight = progress, in_flight
        shown = entry.member
        new = entry.state, experts, epoch, reach
        if (shown.state, shown.experts, shown.epoch, shown.reach) == new:
            return []
        entry.member = replace(shown, state=entry.state, experts=experts, epoch=epoch, reach=reach)
        reason = "reported"
        if entry.progress.stuck and shown.state is not MemberState.SUSPECT:
            reason = entry.progress.stuck
        elif was_stuck and not entry.progress.stuck:
            reason = "its work moves again"
        elif was_late:
            reason = "heard again"
        return [self._event(entry, reason)]

    def report_outcomes(
        self,
        client_id: str,
        incarnation: int,
        about: Iterable[tuple[str, int, RequestTotals]],
        now: float,
    ) -> list[MemberEvent]:
        """Record an attention client's failure reports about servers: (id, incarnation, totals) each.

        They can make a server SUSPECT despite its heartbeats, or clear it.

        Reports about unknown servers or incarnations are dropped.

        Raises:
            ValueError: The reporting member is not an attention client.
            UnknownIncarnationError: No live member has this id and incarnation.
        """
        client = self._entry(client_id, incarnation)
        if client.member.role is not Role.ATTENTION_CLIENT:
            raise ValueError(
                f"{client_id} is not an attention client: it sends no requests to expert servers"
            )
        events = []
        for server_id, server_incarnation, totals in about:
            entry = self._live.get(server_id)
            if (
                entry is not None
                and entry.member.incarnation == server_incarnation
                and entry.member.role is Role.EXPERT_SERVER
            ):
                self._reports.record(server_id, client_id, totals, now)
                if not self._detector.paused_s(now):
                    events += self._apply_accusation(entry, now)
        return events

    def require(self, member_id: str, incarnation: int) -> Member:
        """Return the member if live with this incarnation (`KeepRecord`). Raises UnknownIncarnationError."""
        return self._entry(member_id, incarnation).member

    def living(self, member_id: str) -> Member | None:
        """Return the member if it is live, else None; its role must be that of the caller's certificate."""
        entry = self._live.get(member_id)
        return None if entry is None else entry.member

    def _entry(self, member_id: str, incarnation: int) -> MemberEntry:
        entry = self._live.get(member_id)
        if entry is None or entry.member.incarnation != incarnation:
            raise UnknownIncarnationError(
                f"{member_id}, incarnation {incarnation}, is not known: register"
            )
        return entry

    def _apply_accusation(self, entry: MemberEntry, now: float) -> list[MemberEvent]:
        """Make a server SUSPECT, or end that suspicion, by its clients' newest failure reports."""
        entry.accusation = self._reports.accusation(entry.member.id, now)
        if entry.member.state is entry.state:
            return []
        entry.member = replace(entry.member, state=entry.state)
        return [self._event(entry, entry.accusation or "its clients get answers again")]

    def deregister(
        self, member_id: str, incarnation: int, reason: str, now: float
    ) -> list[MemberEvent]:
        """Make a member LEFT at once: its process says that it ends. Unknown incarnations are ignored."""
        entry = self._live.get(member_id)
        if entry is None or entry.member.incarnation != incarnation:
            return []
        return self._end(entry, MemberState.LEFT, reason or "said goodbye", now)

    @property
    def hold_reason(self) -> str | None:
        """Why the last tick declared no member dead although leases may have ended, as text, or None."""
        return self._detector.hold_reason

    def due_at(self) -> float:
        """Time at which the next lease ends without a heartbeat (the next `tick`); inf without members.

        -inf if the last tick has left work for another.
        """
        return -math.inf if self._behind else self._detector.due_at()

    def tick(self, now: float) -> list[MemberEvent]:
        """Advance the time: silent members become SUSPECT, then DEAD; clients' reports make servers SUSPECT
        or clear them; old tombstones are forgotten.

        Call it every lease/8, and at `due_at`.
        """
        if paused_s := self._detector.paused_s(now):
            self._reports.skip(paused_s)
        silence = self._detector.tick(now)
        events = []
        self._late.extend(silence.late)
        for _ in range(min(_MOST_IN_A_TICK, len(self._late))):
            entry = self._live.get(self._late.popleft())
            if entry is not None and entry.member.state is not entry.state:
                entry.member = replace(entry.member, state=entry.state)
                reason = f"silent for {now - entry.arrivals.heard_at:.1f} s"
                events.append(self._event(entry, reason))
        # The detector names the others again.
        for member_id in silence.lapsed[:_MOST_IN_A_TICK]:
            entry = self._live[member_id]
            reason = f"lease ended: silent for {now - entry.arrivals.heard_at:.1f} s"
            events += self._end(entry, MemberState.DEAD, reason, now)
        self._behind = bool(self._late) or len(silence.lapsed) > _MOST_IN_A_TICK
        for member_id in self._reports.open_servers():
            events += self._apply_accusation(self._live[member_id], now)
        for entry in [t for t in self._tombstones.values() if now >= t.forget_at]:
            events.append(self._forget(entry))
        return events

    def _end(
        self, entry: MemberEntry, state: MemberState, reason: str, now: float
    ) -> list[MemberEvent]:
        """End a member's incarnation as DEAD or LEFT; it stays listed as a tombstone, at most 64 of them."""
        member_id = entry.member.id
        entry.member = replace(entry.member, state=state)
        entry.progress.in_flight = entry.loading_bytes = entry.loaded_bytes = 0
        entry.forget_at = now + _forget_s(entry.member)
        del self._live[member_id]
        self._detector.forget(member_id)
        self._reports.forget(member_id)
        events = [self._event(entry, reason)]
        if len(self._tombstones) == _MAX_TOMBSTONES:
            events.append(self._forget(min(self._tombstones.values(), key=lambda t: t.forget_at)))
        self._tombstones[member_id] = entry
        return events

    def _forget(self, tombstone: MemberEntry) -> MemberEvent:
        member = tombstone.member
        del self._tombstones[member.id]
        self._forgotten_incarnation = max(self._forgotten_incarnation, member.incarnation)
        return self._event(tombstone, "is no longer listed", forgotten=True)

    def _event(self, entry: MemberEntry, reason: str, *, forgotten: bool = False) -> MemberEvent:
        self._revision += 1
        entry.revision = self._revision
        event = MemberEvent(self._revision, entry.full(0.0), reason, forgotten)
        self._history.append(event)
        return event


def _require_own_state(member_id: str, state: MemberState) -> None:
    """Raise ValueError if a member reports a state that only the monitor sets: SUSPECT, DEAD or LEFT."""
    if state is MemberState.SUSPECT or state.is_gone:
        raise ValueError(
            f"{member_id}: a member does not report {state.value}: only the monitor does"
        )


def _forget_s(member: Member) -> float:
    """Seconds until a DEAD or LEFT member is forgotten: a minute, ten minutes or a day, by state and role."""
    if member.state is MemberState.LEFT:
        return _FORGET_LEFT_S
    if member.role is Role.ATTENTION_CLIENT:
        return _FORGET_DEAD_CLIENT_S
    return _FORGET_DEAD_S
