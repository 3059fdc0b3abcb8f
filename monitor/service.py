"""The registry on the wire: what a monitor answers while it leads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import grpc

from eaas.grpc_client import STREAM_SIGN_S
from eaas.log import get_logger
from eaas.rpc.v1 import monitor_pb2 as pb
from eaas.session import PROTOCOL_VERSION
from eaas.types import Member, MemberState
from monitor.journal import Journal
from monitor.life import MemberEvent
from monitor.outcomes import Said
from monitor.registry import IdTakenError, Registry, UnknownLifeError
from monitor.store import Store
from monitor.store.kept import new_life

__all__ = ["MonitorService"]

_log = get_logger(__name__)
# Between two ticks, however many leases end.
_LEAST_GAP_S = 0.005

# Below the deadline of whoever registers.
_STORE_S = 1.5
# Far above what any life reaches, and below what the contract's numbers can hold.
_MOST_INCARNATIONS = 1 << 62


class MonitorService:
    """Answers the contract's MonitorService, from its making until `end`. Any thread may call it.

    Nobody is told of what would not survive this process: registrations and goodbyes are answered, and
    watchers told of events, once the store has them. Heartbeats wait for nothing.

    Args:
        lease_s: Seconds of silence that end a life.
        heartbeat_s: What members are told to send a heartbeat at.
        clock: Monotonic seconds.
        store: Where membership is kept; None: nowhere.
        on_lost: Called once, from a thread of its own, when the store takes nothing any more.
    """

    def __init__(
        self,
        lease_s: float,
        heartbeat_s: float,
        clock: Callable[[], float] = time.monotonic,
        store: Store | None = None,
        on_lost: Callable[[str], None] = _log.error,
    ) -> None:
        self._lease_s = lease_s
        self._heartbeat_s = heartbeat_s
        self._clock = clock
        kept = store.kept.without_monitors() if store is not None else None
        self._life = kept.life if kept is not None else new_life()
        self._registry = Registry(lease_s, heartbeat_s, clock(), kept)
        self._doubt: str | None = None
        lock = threading.RLock()
        # Held while the registry is touched; notified when there is something to tell watchers.
        self._changed = threading.Condition(lock)
        self._store = store
        self._journal = (
            Journal(self._registry, store, lock, self._changed.notify_all, self._lose)
            if store is not None
            else None
        )
        self._on_lost = on_lost
        self._over = False
        self._stopping = False
        self._watchers = 0
        self._own: Member | None = None

    # -- the owner's side ----------------------------------------------------------------------

    def register_self(self, member: Member) -> None:
        """The monitor is a member too; `tick` is its heartbeat."""
        with self._changed:
            incarnation, events = self._registry.register(member, 0, self._clock())
            self._own = replace(member, incarnation=incarnation)
            self._tell(events)

    def tick(self) -> float:
        """Lets silence have its effect. Returns in how many seconds it is to be called again."""
        with self._changed:
            now = self._clock()
            if self._own is not None:
                own = self._own
                self._registry.heartbeat(own.id, own.incarnation, now, state=own.state)
            self._tell(self._registry.tick(now))
            doubt, known = self._registry.doubt, self._doubt
            self._doubt = doubt
            if doubt is not None and doubt != known:
                _log.warning("%s", doubt)
            # A lease that ends between two ticks is not to wait for the second one.
            return min(self._lease_s / 8, max(_LEAST_GAP_S, self._registry.due_at() - now))

    def end(self) -> None:
        """Answers nobody any more; running streams end. What happened until now is still stored."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        if self._journal is not None:
            self._journal.close()

    def _lose(self, reason: str) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._on_lost(reason)

    def announce_stop(self, linger_s: float) -> None:
        """Tells every watcher that the cluster stops.

        Waits up to `linger_s` until they have left.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not (self._watchers or self._others_live()), linger_s)

    def _others_live(self) -> bool:
        own_id = self._own.id if self._own else None
        return any(
            member.id != own_id and member.state is not MemberState.DEAD
            for member in self._registry.members(self._clock())
        )

    def _tell(self, events: Sequence[MemberEvent]) -> None:
        for event in events:
            member = event.member
            _log.info(
                "%s #%d %s: %s", member.id, member.incarnation, member.state.value, event.reason
            )
        if events and self._journal is not None:
            self._journal.wake()
        elif events:
            self._changed.notify_all()

    @property
    def _stored(self) -> int:
        """Revision up to which everything survives this process, so that others may be told."""
        return self._registry.revision if self._journal is None else self._journal.stored

    def _require_lead(self, context: Any) -> None:
        """Refuses once this monitor may have a successor, which a process that was stopped learns here."""
        if self._over or (self._store is not None and self._clock() >= self._store.leads_until):
            context.abort(grpc.StatusCode.UNAVAILABLE, "this monitor leads no more")

    def _settle(self, context: Any) -> None:
        """Waits until what happened so far is stored; the lock is held, and given away meanwhile."""
        revision = self._registry.revision
        if not self._changed.wait_for(lambda: self._over or self._stored >= revision, _STORE_S):
            context.abort(grpc.StatusCode.UNAVAILABLE, "the monitor's store does not answer")
        self._require_lead(context)

    # -- the contract --------------------------------------------------------------------------

    def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterResponse:
        """A life begins or goes on (errors: `monitor.proto`)."""
        if request.protocol_version != PROTOCOL_VERSION:
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this monitor speaks version {PROTOCOL_VERSION} of the contract, "
                f"{request.member.id} speaks {request.protocol_version}: upgrade the older one",
            )
        self._require_lead(context)
        try:
            if request.previous_incarnation >= _MOST_INCARNATIONS:
                raise ValueError(f"no life has incarnation {request.previous_incarnation}")
            member = Member.from_proto(request.member)
            with self._changed:
                incarnation, events = self._registry.register(
                    member, request.previous_incarnation, self._clock()
                )
                self._tell(events)
                revision = self._registry.revision
                self._settle(context)
        except ValueError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except IdTakenError as error:
            context.abort(grpc.StatusCode.ALREADY_EXISTS, str(error))
        return pb.RegisterResponse(
            incarnation=incarnation,
            lease_s=self._lease_s,
            heartbeat_s=self._heartbeat_s,
            revision=revision,
        )

    def Heartbeat(
        self, requests: Iterator[pb.HeartbeatRequest], context: Any
    ) -> Iterator[pb.HeartbeatResponse]:
        """Renews the lease. A stream that breaks says nothing of its member: the lease decides."""
        for request in requests:
            self._require_lead(context)
            try:
                state = MemberState.from_number(request.state)
                with self._changed:
                    events = self._registry.heartbeat(
                        request.id,
                        request.incarnation,
                        self._clock(),
                        state=state,
                        progress=request.progress,
                        in_flight=request.in_flight,
                        experts=request.experts,
                        epoch=request.epoch,
                        stalled_s=request.stalled_s,
                        busy_s=request.busy_s,
                    )
                    self._tell(events)
                    revision = self._stored
            except ValueError as error:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            except UnknownLifeError as error:
                context.abort(grpc.StatusCode.NOT_FOUND, str(error))
            yield pb.HeartbeatResponse(revision=revision)

    def Watch(self, request: pb.WatchRequest, context: Any) -> Iterator[pb.WatchResponse]:
        """A snapshot (or what was missed), then each event; a sign of life where nothing happens."""
        if not context.add_callback(self._wake):
            return
        with self._changed:
            self._watchers += 1
        try:
            # No revision is below 0: with -1 the registry answers "take a snapshot".
            seen = request.from_revision if request.life == self._life else -1
            while context.is_active():
                self._require_lead(context)
                messages, seen, stopping = self._next(seen, context)
                # Much may have happened while it slept.
                self._require_lead(context)
                yield from messages
                if stopping:
                    return
        finally:
            with self._changed:
                self._watchers -= 1
                self._changed.notify_all()

    def Deregister(self, request: pb.DeregisterRequest, context: Any) -> pb.DeregisterResponse:
        """A goodbye."""
        if self._own is not None and request.id == self._own.id:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "nobody deregisters the monitor")
        self._require_lead(context)
        with self._changed:
            events = self._registry.deregister(request.id, request.incarnation, request.reason)
            self._tell(events)
            self._settle(context)
        return pb.DeregisterResponse()

    def ReportOutcome(
        self, request: pb.ReportOutcomeRequest, context: Any
    ) -> pb.ReportOutcomeResponse:
        """What a client's requests came to (errors: `monitor.proto`)."""
        self._require_lead(context)
        try:
            with self._changed:
                events = self._registry.report_outcomes(
                    request.client_id,
                    request.client_incarnation,
                    ((s.server_id, s.server_incarnation, _said(s)) for s in request.servers),
                    self._clock(),
                )
                self._tell(events)
        except ValueError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except UnknownLifeError as error:
            context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        return pb.ReportOutcomeResponse()

    # -- watchers ------------------------------------------------------------------------------

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _next(self, seen: int, context: Any) -> tuple[list[pb.WatchResponse], int, bool]:
        """What to send a watcher that has seen `seen`.

        Waits for it, but not beyond a sign of life.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._stored != seen or self._gone(context) or self._stopping, STREAM_SIGN_S
            )
            messages = []
            events = self._registry.since(seen)
            if events is None:
                snapshot = self._snapshot()
                if self._changed.wait_for(
                    lambda: self._stored >= snapshot.revision or self._gone(context), STREAM_SIGN_S
                ):
                    messages.append(pb.WatchResponse(snapshot=snapshot))
                    seen = snapshot.revision
            else:
                stored = self._stored
                messages.extend(
                    pb.WatchResponse(event=_to_proto(event))
                    for event in events
                    if event.revision <= stored
                )
                seen = stored
            if self._stopping:
                messages.append(pb.WatchResponse(stopping=True))
            if not messages:
                messages.append(pb.WatchResponse(still_at_revision=seen))
            return messages, seen, self._stopping

    def _gone(self, context: Any) -> bool:
        return self._over or not context.is_active()

    def _snapshot(self) -> pb.Snapshot:
        members = self._registry.members(self._clock())
        return pb.Snapshot(
            revision=self._registry.revision,
            members=[member.to_proto() for member in members],
            life=self._life,
        )


def _to_proto(event: MemberEvent) -> pb.MemberEvent:
    return pb.MemberEvent(
        revision=event.revision, member=event.member.to_proto(), reason=event.reason
    )


def _said(s: pb.ServerOutcomes) -> Said:
    failures = s.timed_out + s.lost + s.failed + s.corrupt + s.hedged_away
    return Said(s.answered + s.refused + failures, s.answered, s.failures_since_answer)
