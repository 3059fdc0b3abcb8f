"""The registry on the wire: what a monitor answers while it leads."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import grpc

from eaas import versions
from eaas.authority import role_of
from eaas.grpc_client import STREAM_SIGN_S
from eaas.log import get_logger
from eaas.rpc.v1 import monitor_pb2 as pb
from eaas.types import Member, MemberState, Role
from monitor.fanout import Fanout, message_of
from monitor.journal import Journal
from monitor.life import MemberEvent
from monitor.outcomes import Said
from monitor.records import MOST_BYTES, Records, StaleRecordError
from monitor.refusal import (
    LONGEST_TEXT,
    Refused,
    judged,
    reach_of,
    refusals,
    require_role,
    require_small,
    require_sound,
)
from monitor.registry import IdTakenError, Registry
from monitor.store import Store
from monitor.store.kept import new_life

__all__ = ["MonitorService"]

_log = get_logger(__name__)
# Between two ticks, however many leases end.
_LEAST_GAP_S = 0.005
# Of a lease: silence that ends it. In what is left the monitor notices, stores it and tells everybody.
_SILENCE_SHARE = 0.97
# For so long its loads are of this moment: many watchers may come at once.
_SNAPSHOT_S = 0.05
_NO_SNAPSHOT = (-math.inf, -1, b"")
_STOPPING = pb.WatchResponse(stopping=True).SerializeToString()
# Below the deadline of whoever registers.
_STORE_S = 1.5


class MonitorService:
    """Answers the contract's MonitorService, from its making until `end`.

    The contract's methods are coroutines of one loop, thousands of them at a time: none of them blocks. The
    owner's methods are for any other thread, but for `tick`, which belongs to the loop's. What they share is
    guarded by a lock that nobody holds for long.

    Nobody is told of what would not survive this process: registrations and goodbyes are answered, and
    watchers told of events, once the store has them. Heartbeats wait for nothing.

    Args:
        lease_s: Seconds of silence within which everybody knows of a death.
        heartbeat_s: What members are told to send a heartbeat at.
        loop: Runs the contract's methods.
        clock: Monotonic seconds.
        store: Where membership is kept; None: nowhere.
        on_lost: Called once, from a thread of its own, when the store takes nothing any more.
    """

    def __init__(
        self,
        lease_s: float,
        heartbeat_s: float,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float] = time.monotonic,
        store: Store | None = None,
        on_lost: Callable[[str], None] = _log.error,
    ) -> None:
        self._lease_s = lease_s
        self._heartbeat_s = heartbeat_s
        self._clock = clock
        kept = store.kept.without_monitors() if store is not None else None
        self._life = kept.life if kept is not None else new_life()
        self._registry = Registry(_SILENCE_SHARE * lease_s, heartbeat_s, clock(), kept)
        self._doubt: str | None = None
        lock = threading.RLock()
        # Held while the registry is touched, never over an `await`; notified when watchers leave.
        self._changed = threading.Condition(lock)
        self._fanout = Fanout(loop, STREAM_SIGN_S)
        self._store = store
        self._records = Records(kept.records if kept is not None else ())
        self._journal = (
            Journal(self._registry, store, lock, self._fanout.stir, self._lose, self._records)
            if store is not None
            else None
        )
        self._on_lost = on_lost
        self._over = False
        self._stopping = False
        self._watchers = 0
        self._own: Member | None = None
        # What all watchers, and all members, are answered until something happens.
        self._answer: tuple[int, bytes] = (-1, b"")
        self._snapshots: dict[bool, tuple[float, int, bytes]] = {}

    # -- the owner's side ----------------------------------------------------------------------

    def register_self(self, member: Member) -> None:
        """The monitor is a member too; `tick` is its heartbeat."""
        with self._changed:
            incarnation, events = self._registry.register(member, 0, self._clock())
            self._own = replace(member, incarnation=incarnation)
            self._tell(events)

    def tick(self) -> float:
        """Lets silence have its effect. Returns in how many seconds it is to be called again.

        To be called by the loop, so that a gap between two ticks is one in which nobody was heard.
        """
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
        self._fanout.stir()
        if self._journal is not None:
            self._journal.close()

    def _lose(self, reason: str) -> None:
        with self._changed:
            self._over = True
        self._fanout.stir()
        self._on_lost(reason)

    def announce_stop(self, linger_s: float) -> None:
        """Tells every watcher that the cluster stops.

        Waits up to `linger_s` until they have left.
        """
        with self._changed:
            self._stopping = True
            self._fanout.stir()
            self._changed.wait_for(lambda: not (self._watchers or self._others_live()), linger_s)

    def _others_live(self) -> bool:
        own_id = self._own.id if self._own else None
        return any(
            member.id != own_id and not member.state.is_gone
            for member in self._registry.members(self._clock())
        )

    def _tell(self, events: Sequence[MemberEvent]) -> None:
        for event in events:
            member = event.member
            _log.info(
                "%s #%d %s: %s", member.id, member.incarnation, member.state.value, event.reason
            )
        if not events:
            return
        # Whoever stops the cluster waits until all have left.
        self._changed.notify_all()
        if self._journal is not None:
            self._journal.wake()
        else:
            self._fanout.stir()

    @property
    def _stored(self) -> int:
        """Revision up to which everything survives this process, so that others may be told."""
        return self._registry.revision if self._journal is None else self._journal.stored

    def _require_lead(self) -> None:
        """Refuses once this monitor may have a successor, which a process that was stopped learns here."""
        if self._over or (self._store is not None and self._clock() >= self._store.leads_until):
            raise Refused(grpc.StatusCode.UNAVAILABLE, "this monitor leads no more")

    def _require_own(self, certified: str | None, member_id: str) -> None:
        """Refuses whoever speaks for a member of another role than its certificate's. The lock is held."""
        if certified is not None and (member := self._registry.living(member_id)) is not None:
            require_role(certified, member.role)

    async def _settle(self, revision: int, records: int = 0) -> None:
        """Waits until what happened up to `revision`, and so many records, are stored."""
        journal = self._journal
        try:
            async with asyncio.timeout(_STORE_S):
                while not self._over and (
                    self._stored < revision
                    or (journal is not None and journal.stored_records < records)
                ):
                    await self._fanout.sleep()
        except TimeoutError:
            raise Refused(
                grpc.StatusCode.UNAVAILABLE, "the monitor's store does not answer"
            ) from None
        self._require_lead()

    # -- the contract --------------------------------------------------------------------------

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterResponse:
        """A life begins or goes on (errors: `monitor.proto`)."""
        async with refusals(context):
            refusal = versions.refusal(
                versions.CONTROL_PLANE,
                request.protocol_version,
                "the control plane",
                request.member.id,
                "this monitor",
            )
            if refusal is not None:
                raise Refused(grpc.StatusCode.FAILED_PRECONDITION, *refusal)
            self._require_lead()
            if self._own is not None and request.member.id == self._own.id:
                raise IdTakenError(f"{request.member.id} is this monitor: give another id")
            require_small(request.member)
            with judged():
                member = Member.from_proto(request.member)
            require_role(role_of(context), member.role)
            with self._changed:
                self._require_own(role_of(context), member.id)
                with judged():
                    incarnation, events = self._registry.register(
                        member,
                        request.previous_incarnation,
                        self._clock(),
                        request.ended_pids,
                    )
                self._tell(events)
                revision = self._registry.revision
            await self._settle(revision)
        return pb.RegisterResponse(
            incarnation=incarnation,
            lease_s=self._lease_s,
            heartbeat_s=self._heartbeat_s,
            revision=revision,
        )

    async def Heartbeat(self, _requests: Any, context: Any) -> None:
        """Renews the lease. A stream that breaks says nothing of its member: the lease decides."""
        async with refusals(context):
            certified = role_of(context)
            while (request := await context.read()) is not grpc.aio.EOF:
                require_sound(request)
                await context.write(self._heard(request, certified))

    def _heard(self, request: pb.HeartbeatRequest, certified: str | None) -> bytes:
        """Takes a heartbeat; returns the answer, serialized."""
        self._require_lead()
        if self._own is not None and request.id == self._own.id:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "nobody speaks for the monitor")
        with self._changed:
            self._require_own(certified, request.id)
            with judged():
                events = self._registry.heartbeat(
                    request.id,
                    request.incarnation,
                    self._clock(),
                    state=MemberState.from_number(request.state),
                    progress=request.progress,
                    in_flight=request.in_flight,
                    experts=request.experts,
                    epoch=request.epoch,
                    stalled_s=request.stalled_s,
                    busy_s=request.busy_s,
                    reach=reach_of(request),
                )
            self._tell(events)
            stored = self._stored
        if self._answer[0] != stored:
            self._answer = stored, pb.HeartbeatResponse(revision=stored).SerializeToString()
        return self._answer[1]

    async def Watch(self, request: pb.WatchRequest, context: Any) -> None:
        """A snapshot (or what was missed), then each event; a sign of life where nothing happens."""
        with self._changed:
            self._watchers += 1
        try:
            async with refusals(context):
                # No revision is below 0: with -1 the registry answers "take a snapshot".
                seen = request.from_revision if request.life == self._life else -1
                await self._send_all(seen, request, context)
        finally:
            with self._changed:
                self._watchers -= 1
                self._changed.notify_all()

    async def Deregister(
        self, request: pb.DeregisterRequest, context: Any
    ) -> pb.DeregisterResponse:
        """A goodbye."""
        async with refusals(context):
            if self._own is not None and request.id == self._own.id:
                raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "nobody deregisters the monitor")
            self._require_lead()
            with self._changed:
                self._require_own(role_of(context), request.id)
                reason = request.reason[:LONGEST_TEXT]
                events = self._registry.deregister(
                    request.id, request.incarnation, reason, self._clock()
                )
                self._tell(events)
                revision = self._registry.revision
            await self._settle(revision)
        return pb.DeregisterResponse()

    async def ReportOutcome(
        self, request: pb.ReportOutcomeRequest, context: Any
    ) -> pb.ReportOutcomeResponse:
        """What a client's requests came to (errors: `monitor.proto`)."""
        async with refusals(context):
            require_role(role_of(context), Role.ATTENTION_CLIENT)
            self._require_lead()
            with self._changed:
                with judged():
                    events = self._registry.report_outcomes(
                        request.client_id,
                        request.client_incarnation,
                        ((s.server_id, s.server_incarnation, _said(s)) for s in request.servers),
                        self._clock(),
                    )
                self._tell(events)
        return pb.ReportOutcomeResponse()

    async def KeepRecord(
        self, request: pb.KeepRecordRequest, context: Any
    ) -> pb.KeepRecordResponse:
        """What a balancer leaves (errors: `monitor.proto`)."""
        async with refusals(context):
            require_role(role_of(context), Role.BALANCER)
            self._require_lead()
            with self._changed:
                member = self._registry.require(request.id, request.incarnation)
                if member.role is not Role.BALANCER or len(request.data) > MOST_BYTES:
                    raise Refused(
                        grpc.StatusCode.INVALID_ARGUMENT,
                        f"records are for balancers, and have {MOST_BYTES} bytes at most",
                    )
                try:
                    kept = self._records.keep(request)
                except StaleRecordError as error:
                    raise Refused(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from error
                if self._journal is not None:
                    self._journal.wake()
            await self._settle(0, kept)
        return pb.KeepRecordResponse()

    async def GetRecord(self, request: pb.GetRecordRequest, context: Any) -> pb.GetRecordResponse:
        """What was kept last."""
        async with refusals(context):
            require_role(role_of(context), Role.BALANCER)
            self._require_lead()
            with self._changed:
                record = self._records.get(request.id)
        if record is None:
            return pb.GetRecordResponse()
        return pb.GetRecordResponse(
            data=record.data, incarnation=record.incarnation, version=record.version
        )

    # -- watchers ------------------------------------------------------------------------------

    async def _send_all(self, seen: int, request: pb.WatchRequest, context: Any) -> None:
        """Sends a watcher that has seen `seen` what happens, until the cluster stops."""
        heartbeats_tell, knows_left = request.heartbeats_tell, request.knows_left
        ahead: tuple[int, bytes] | None = None
        spoke = not heartbeats_tell
        while True:
            self._require_lead()
            with self._changed:
                stored, stopping = self._stored, self._stopping
                events = () if ahead else self._registry.since(seen)
                if events is None:
                    ahead = self._take_snapshot(knows_left)
            messages = []
            if events:
                messages = [
                    self._fanout.message(e, knows_left) for e in events if e.revision <= stored
                ]
                seen = stored
            if ahead and ahead[0] <= stored:
                seen, snapshot = ahead
                ahead = None
                await self._fanout.send_snapshot(snapshot, context)
                spoke = True
                continue
            if stopping:
                messages.append(_STOPPING)
            if not messages:
                if seen < 0:
                    # There is no sign of life before the first snapshot, which is not stored yet.
                    await self._fanout.sleep()
                    continue
                if spoke and await self._fanout.sleep(soundly=heartbeats_tell):
                    continue
                # Much may have happened while it slept.
                self._require_lead()
                messages = [pb.WatchResponse(still_at_revision=seen).SerializeToString()]
            for message in messages:
                await context.write(message)
            spoke = True
            if stopping:
                return

    def _take_snapshot(self, knows_left: bool) -> tuple[int, bytes]:
        """Everybody, with the loads of this moment; and the revision. The lock is held."""
        now, revision = self._clock(), self._registry.revision
        made_at, known, message = self._snapshots.get(knows_left, _NO_SNAPSHOT)
        if known != revision or now - made_at > _SNAPSHOT_S:
            members = [message_of(member, knows_left) for member in self._registry.members(now)]
            response = pb.WatchResponse(
                snapshot=pb.Snapshot(revision=revision, members=members, life=self._life)
            )
            message = response.SerializeToString()
            self._snapshots[knows_left] = now, revision, message
        return revision, message


def _said(s: pb.ServerOutcomes) -> Said:
    failures = s.timed_out + s.lost + s.failed + s.corrupt + s.hedged_away
    return Said(s.answered + s.refused + failures, s.answered, s.failures_since_answer)
