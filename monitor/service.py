"""The monitor's gRPC service while it leads: answers members' calls from the registry."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import grpc

from eaas import versions
from eaas.log import get_logger
from eaas.net.authorisation import role_of
from eaas.net.grpc_client import STREAM_SIGN_S
from eaas.rpc.v1 import monitor_pb2 as pb
from eaas.types import Member, MemberState, Role
from monitor.failure_detection.failure_reports import RequestTotals
from monitor.fanout import Fanout
from monitor.incarnation import MemberEvent
from monitor.records import MOST_BYTES, Records, StaleRecordError
from monitor.refusal import (
    LONGEST_TEXT,
    Refused,
    bad_arguments,
    reach_of,
    require_role,
    require_small,
    require_valid,
)
from monitor.registry import IdTakenError, Registry
from monitor.snapshots import Knows, Snapshots
from monitor.store import Store
from monitor.store.kept import new_life
from monitor.store_writer import StoreWriter

__all__ = ["MonitorService"]

_log = get_logger(__name__)
# Minimum time between two ticks, regardless of how many leases end.
_MIN_TICK_S = 0.005
# Share of the lease for which a member may be silent. The rest is for noticing, storing and announcing it.
_SILENCE_SHARE = 0.97
_STOPPING = pb.WatchResponse(stopping=True).SerializeToString()
# Must be below the deadline of a registration.
_STORE_S = 1.5


class MonitorService:
    """Serves the calls of the contract's MonitorService, from its creation until `end`.

    The contract's methods are coroutines of one loop, thousands at a time; none of them blocks. They raise
    exceptions that `monitor.refusal.refusals` turns into statuses. The owner's methods are for other threads,
    except `tick`, which runs in the loop. A lock, held for short times only, guards their shared state.

    The service announces no change that a crash of this process would undo. It answers registrations and
    deregistrations, and sends events to watchers, only once they are stored. Heartbeats wait for nothing.

    Args:
        lease_s: Seconds of silence after which all members know of a death.
        heartbeat_s: The members' heartbeat interval.
        loop: Runs the contract's methods.
        store: Keeps the membership; None keeps it in memory only.
        on_lost: Called once, from a separate thread, when the store fails.
    """

    def __init__(
        self,
        lease_s: float,
        heartbeat_s: float,
        loop: asyncio.AbstractEventLoop,
        store: Store | None = None,
        on_lost: Callable[[str], None] = _log.error,
    ) -> None:
        self._lease_s = lease_s
        self._heartbeat_s = heartbeat_s
        kept = store.kept.without_monitors() if store is not None else None
        self._life = kept.life if kept is not None else new_life()
        self._registry = Registry(_SILENCE_SHARE * lease_s, heartbeat_s, time.monotonic(), kept)
        self._hold_reason: str | None = None
        lock = threading.RLock()
        # Held while the registry is used, but never during an `await`. Notified when watchers leave.
        self._changed = threading.Condition(lock)
        self._fanout = Fanout(loop, STREAM_SIGN_S)
        self._store = store
        self._records = Records(kept.records if kept is not None else ())
        self._writer = (
            StoreWriter(
                self._registry, store, lock, self._fanout.notify, self._on_store_lost, self._records
            )
            if store is not None
            else None
        )
        self._on_lost = on_lost
        self._over = False
        self._stopping = False
        self._watchers = 0
        self._own: Member | None = None
        self._own_id: str | None = None
        # Heartbeat reply, shared by all members until the next change.
        self._heartbeat_reply: tuple[int, bytes] = (-1, b"")
        self._snapshots = Snapshots(self._registry, lock, self._life)

    # -- the owner's side ----------------------------------------------------------------------

    def register_self(self, member: Member) -> None:
        """List this monitor as a member, once it leads. `tick` renews its lease, as no call does."""
        with self._changed:
            incarnation, events = self._registry.register(member, 0, time.monotonic())
            self._own = replace(member, incarnation=incarnation)
            self._own_id = member.id
            self._publish(events)

    def tick(self) -> float:
        """Run the failure detector: advance the registry's time. Returns the seconds until the next call.

        Call it in the loop, so that a gap between two ticks is a time in which no heartbeat was heard.
        """
        with self._changed:
            now = time.monotonic()
            if self._own is not None:
                own = self._own
                self._registry.heartbeat(own.id, own.incarnation, now, state=own.state)
            self._publish(self._registry.tick(now))
            reason, known = self._registry.hold_reason, self._hold_reason
            self._hold_reason = reason
            if reason is not None and reason != known:
                _log.warning("%s", reason)
            # A lease that ends between two ticks does not wait for the second one.
            return min(self._lease_s / 8, max(_MIN_TICK_S, self._registry.due_at() - now))

    def end(self) -> None:
        """Stop answering calls and end running streams, because the lead ended. Stores pending changes."""
        with self._changed:
            self._over = True
        self._fanout.notify()
        if self._writer is not None:
            self._writer.close()

    def _on_store_lost(self, reason: str) -> None:
        with self._changed:
            self._over = True
        self._fanout.notify()
        self._on_lost(reason)

    def announce_stop(self, linger_s: float) -> None:
        """Tell all members, in their Watch streams, that the operator stops the cluster, so that they end.

        It waits up to `linger_s` until they have left.
        """
        with self._changed:
            self._stopping = True
            self._fanout.notify()
            self._changed.wait_for(lambda: not (self._watchers or self._others_live()), linger_s)

    def _others_live(self) -> bool:
        return self._registry.has_others(self._own_id or "")

    def _publish(self, events: Sequence[MemberEvent]) -> None:
        for event in events:
            member = event.member
            _log.info(
                "%s #%d %s: %s", member.id, member.incarnation, member.state.value, event.reason
            )
        if not events:
            return
        # `announce_stop` waits until all members have left.
        self._changed.notify_all()
        if self._writer is not None:
            self._writer.wake()
        else:
            self._fanout.notify()

    @property
    def _stored(self) -> int:
        """Last revision that survives a crash of this process; watchers learn only of events up to it."""
        return self._registry.revision if self._writer is None else self._writer.stored

    def _require_lead(self) -> None:
        """Refuse a call once another monitor may lead; a process that was suspended learns of it here."""
        if self._over or (self._store is not None and time.monotonic() >= self._store.leads_until):
            raise Refused(grpc.StatusCode.UNAVAILABLE, "this monitor no longer leads")

    def _require_own(self, certified: str | None, member_id: str) -> None:
        """Refuse a caller whose certificate has another role than the member's. The lock is held."""
        if certified is not None and (member := self._registry.living(member_id)) is not None:
            require_role(certified, member.role)

    async def _wait_stored(self, revision: int, records: int = 0) -> None:
        """Wait until the store has this revision and this many records; a call is answered only then."""
        writer = self._writer
        try:
            async with asyncio.timeout(_STORE_S):
                while not self._over and (
                    self._stored < revision
                    or (writer is not None and writer.stored_records < records)
                ):
                    await self._fanout.sleep()
        except TimeoutError:
            raise Refused(
                grpc.StatusCode.UNAVAILABLE, "the monitor's store does not answer"
            ) from None
        self._require_lead()

    # -- the contract --------------------------------------------------------------------------

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterResponse:
        """Serve a registration: begin or continue an incarnation (errors: `monitor.proto`)."""
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
        if request.member.id == self._own_id:
            raise IdTakenError(f"{request.member.id} is this monitor: give another id")
        require_small(request.member)
        with bad_arguments():
            member = Member.from_proto(request.member)
        require_role(role_of(context), member.role)
        with self._changed:
            self._require_own(role_of(context), member.id)
            with bad_arguments():
                incarnation, events = self._registry.register(
                    member,
                    request.previous_incarnation,
                    time.monotonic(),
                    request.ended_pids,
                    request.session,
                )
            self._publish(events)
            revision = self._registry.revision
        await self._wait_stored(revision)
        return pb.RegisterResponse(
            incarnation=incarnation,
            lease_s=self._lease_s,
            heartbeat_s=self._heartbeat_s,
            revision=revision,
        )

    async def Heartbeat(self, _requests: Any, context: Any) -> None:
        """Serve a stream of a member's heartbeats, which renew its lease; the stream's end has no effect."""
        certified = role_of(context)
        while (request := await context.read()) is not grpc.aio.EOF:
            require_valid(request)
            await context.write(self._on_heartbeat(request, certified))

    def _on_heartbeat(self, request: pb.HeartbeatRequest, certified: str | None) -> bytes:
        """Pass one heartbeat to the registry; returns the serialized reply with the last stored revision."""
        self._require_lead()
        if request.id == self._own_id:
            raise Refused(
                grpc.StatusCode.INVALID_ARGUMENT, "no other process may report for the monitor"
            )
        with self._changed:
            self._require_own(certified, request.id)
            with bad_arguments():
                events = self._registry.heartbeat(
                    request.id,
                    request.incarnation,
                    time.monotonic(),
                    state=MemberState.from_number(request.state),
                    progress=request.progress,
                    in_flight=request.in_flight,
                    experts=request.experts,
                    epoch=request.epoch,
                    stalled_s=request.stalled_s,
                    busy_s=request.busy_s,
                    loading_bytes=request.loading_bytes,
                    loaded_bytes=request.loaded_bytes,
                    reach=reach_of(request),
                )
            self._publish(events)
            stored = self._stored
        if self._heartbeat_reply[0] != stored:
            self._heartbeat_reply = (
                stored,
                pb.HeartbeatResponse(revision=stored).SerializeToString(),
            )
        return self._heartbeat_reply[1]

    async def Watch(self, request: pb.WatchRequest, context: Any) -> None:
        """Serve a watcher: send a snapshot (or the missed events), each new event, and signs of life."""
        with self._changed:
            self._watchers += 1
        try:
            # Revisions are 0 or more, so -1 makes the registry ask for a snapshot.
            seen = request.from_revision if request.life == self._life else -1
            await self._send_all(seen, request, context)
        finally:
            with self._changed:
                self._watchers -= 1
                self._changed.notify_all()

    async def Deregister(
        self, request: pb.DeregisterRequest, context: Any
    ) -> pb.DeregisterResponse:
        """Serve a deregistration: end the member's incarnation as LEFT."""
        if request.id == self._own_id:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "the monitor cannot be deregistered")
        self._require_lead()
        with self._changed:
            self._require_own(role_of(context), request.id)
            reason = request.reason[:LONGEST_TEXT]
            events = self._registry.deregister(
                request.id, request.incarnation, reason, time.monotonic()
            )
            self._publish(events)
            revision = self._registry.revision
        await self._wait_stored(revision)
        return pb.DeregisterResponse()

    async def ReportOutcome(
        self, request: pb.ReportOutcomeRequest, context: Any
    ) -> pb.ReportOutcomeResponse:
        """Record a client's totals of requests per server, which can make a server SUSPECT or clear it.

        Errors: `monitor.proto`.
        """
        require_role(role_of(context), Role.ATTENTION_CLIENT)
        self._require_lead()
        with self._changed:
            with bad_arguments():
                events = self._registry.report_outcomes(
                    request.client_id,
                    request.client_incarnation,
                    ((s.server_id, s.server_incarnation, _totals_of(s)) for s in request.servers),
                    time.monotonic(),
                )
            self._publish(events)
        return pb.ReportOutcomeResponse()

    async def KeepRecord(
        self, request: pb.KeepRecordRequest, context: Any
    ) -> pb.KeepRecordResponse:
        """Store a balancer's state for its successor; answers once it is stored. Errors: `monitor.proto`."""
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
            if self._writer is not None:
                self._writer.wake()
        await self._wait_stored(0, kept)
        return pb.KeepRecordResponse()

    async def GetRecord(self, request: pb.GetRecordRequest, context: Any) -> pb.GetRecordResponse:
        """Return the last record under a balancer's id, from which a new balancer restores its state."""
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
        """Send the events after `seen` to a watcher, until the cluster stops."""
        heartbeats_tell, knows = request.heartbeats_tell, Knows.of(request)
        unstored: tuple[int, bytes] | None = None
        sent = not heartbeats_tell
        while True:
            self._require_lead()
            with self._changed:
                stored, stopping = self._stored, self._stopping
                events = () if unstored else self._registry.since(seen)
            if events is None:
                unstored = await self._snapshots.take(knows)
                continue
            messages = []
            if events:
                messages = [self._fanout.message(e, knows) for e in events if e.revision <= stored]
                seen = stored
            if unstored and unstored[0] <= stored:
                seen, snapshot = unstored
                unstored = None
                await self._fanout.send_snapshot(snapshot, context)
                sent = True
                continue
            if stopping:
                messages.append(_STOPPING)
            if not messages:
                if seen < 0:
                    # The first snapshot is not stored yet, and signs of life must not precede it.
                    await self._fanout.sleep()
                    continue
                if sent and await self._fanout.sleep(until_event=heartbeats_tell):
                    continue
                # Another monitor may have taken the lead during the sleep.
                self._require_lead()
                messages = [pb.WatchResponse(still_at_revision=seen).SerializeToString()]
            for message in messages:
                await context.write(message)
            sent = True
            if stopping:
                return


def _totals_of(s: pb.ServerOutcomes) -> RequestTotals:
    failures = s.timed_out + s.lost + s.failed + s.corrupt + s.hedged_away
    return RequestTotals(s.answered + s.refused + failures, s.answered, s.failures_since_answer)
