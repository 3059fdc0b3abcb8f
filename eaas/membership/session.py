"""Session of a server, client or balancer with the monitor: registration, heartbeats, view of the others.

It is off the data path. While the monitor is unreachable the process keeps the last view, and the session
reconnects automatically.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc

from eaas import versions
from eaas.errors import ClusterError
from eaas.launcher_pipe import ended_pids
from eaas.log import get_logger
from eaas.member_ids import check_id
from eaas.membership.cluster_view import MembershipFold, MembershipView
from eaas.membership.monitors import MonitorConnection, Monitors, tls_hint
from eaas.net.async_channel import Responses, responses
from eaas.net.grpc_client import STREAM_SIGN_S, Backoff
from eaas.net.message_validation import check
from eaas.net.tls import Identity
from eaas.rpc.v1 import monitor_pb2 as pb
from eaas.types import Member, MemberState, Role, ServerReach

__all__ = ["PROTOCOL_VERSION", "MemberSession", "MembershipView", "Report"]

_logger = get_logger(__name__)

PROTOCOL_VERSION = versions.CONTROL_PLANE.newest
"""The newest protocol version of the control plane in this release."""

_REGISTER_S = 2.0
_REPORT_S = 1.0
_GOODBYE_S = 1.0
_JOIN_S = 3.0
# The monitor refuses with these for good, so that a retry cannot help.
_FINAL = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
)


@dataclass(frozen=True)
class Report:
    """A member's own state and counters, sent with each heartbeat (fields: `eaas.types.Member`).

    Attributes:
        stalled_s: Seconds for which overdue work has made no progress; 0 while it progresses.
        busy_s: Total seconds of work; never falls.
        loading_bytes: Bytes that the current load takes; 0 while nothing loads.
        loaded_bytes: How many of them are loaded.
        reach: Sent only when it has changed.
    """

    state: MemberState
    progress: int = 0
    in_flight: int = 0
    experts: int = 0
    epoch: int = 0
    stalled_s: float = 0.0
    busy_s: float = 0.0
    loading_bytes: int = 0
    loaded_bytes: int = 0
    reach: tuple[ServerReach, ...] | None = None


class MemberSession:
    """Registers a process with the monitor at once, then keeps lease and view current from daemon threads.

    Callbacks run on these threads and must not block; their exceptions are logged.

    Args:
        monitor_address: host:port of the monitor; "host:port,host:port" for several.
        member: This process; state and counters come from `report`.
        report: Called for each heartbeat.
        on_change: Called with each new view whose members differ from the last one.
        on_stopping: Called once when the operator stops the cluster.
        on_new_incarnation: Called when the monitor has given this process a new incarnation.
        on_replaced: Called when another process has taken this id.
        register_timeout_s: Deadline of the first registration.
        tls: Identity of this process; None means plain text.

    Raises:
        ConfigError: The id is not valid.
        ClusterError: The first registration failed.
    """

    def __init__(
        self,
        monitor_address: str,
        member: Member,
        *,
        report: Callable[[], Report],
        on_change: Callable[[MembershipView], None] | None = None,
        on_stopping: Callable[[], None] | None = None,
        on_new_incarnation: Callable[[int], None] | None = None,
        on_replaced: Callable[[], None] | None = None,
        register_timeout_s: float = 10.0,
        tls: Identity | None = None,
    ) -> None:
        check_id(member.id, f"the {member.role.value}'s id")
        self.monitor_address = monitor_address
        self._member = member
        self._report = report
        self._on_change = on_change
        self._on_stopping = on_stopping
        self._on_new_incarnation = on_new_incarnation
        self._on_replaced = on_replaced
        self._incarnation = 0
        self._session = secrets.randbits(63) + 1
        self._lease_s = self._heartbeat_s = 0.0
        self._fold = MembershipFold()
        self._viewed = threading.Condition()
        self._closed = threading.Event()
        self._due = threading.Event()
        self._calls_lock = threading.Lock()
        # The running streams and their monitors.
        self._calls: dict[Any, MonitorConnection] = {}
        # The monitor with a working watch stream, and that stream.
        self._watched: tuple[MonitorConnection, Responses] | None = None
        self._monitors = Monitors(monitor_address, tls)
        try:
            self._register_first(register_timeout_s)
        except ClusterError:
            self._monitors.close()
            raise
        self._threads = [
            threading.Thread(target=self._keep_lease, name="session-lease", daemon=True),
            threading.Thread(target=self._keep_view, name="session-view", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def view(self) -> MembershipView:
        """The newest view of all members, this one too; empty until the monitor's first snapshot."""
        return self._fold.view

    @property
    def incarnation(self) -> int:
        """This process's incarnation, assigned by the monitor; it changes if the monitor found it DEAD."""
        return self._incarnation

    @property
    def heartbeat_s(self) -> float:
        """Heartbeat interval in seconds, set by the monitor; clients also report outcomes this often."""
        return self._heartbeat_s

    def report_outcomes(self, outcomes: Sequence[pb.ServerOutcomes]) -> bool:
        """Report an attention client's request outcomes to the monitor; return whether it took them.

        They can make servers SUSPECT. Blocks up to 1 s.
        """
        request = pb.ReportOutcomeRequest(
            client_id=self._member.id, client_incarnation=self._incarnation, servers=outcomes
        )
        try:
            self._monitors.now.stub.ReportOutcome(request, timeout=_REPORT_S)
        except grpc.RpcError as error:
            _logger.debug("outcomes were not reported: %s", _why(error))
            return False
        return True

    def report_now(self) -> None:
        """Wake the heartbeat thread to report now, because state, placement epoch or reach has changed."""
        self._due.set()

    def wait_for(
        self, wanted: Callable[[MembershipView], bool], timeout_s: float
    ) -> MembershipView | None:
        """Wait for a view that `wanted` accepts and return it; None after the timeout. For tests."""
        with self._viewed:
            found = self._viewed.wait_for(lambda: wanted(self.view), timeout_s)
            return self.view if found else None

    def ask_members(self, timeout_s: float) -> dict[str, Member] | None:
        """Read all members with their current loads; None if the monitor does not answer in time.

        The view has no current loads, because they change all the time.
        """
        # Only the streams decide which monitor is current.
        try:
            members = self._monitors.now.members(timeout_s)
        except grpc.RpcError as error:
            _logger.debug("cannot read the members: %s", _why(error))
            return None
        return None if members is None else {m.id: m for m in members}

    def keep_record(self, version: int, data: bytes, timeout_s: float) -> None:
        """Store a balancer's state at the monitor, for the next balancer with this id.

        Args:
            version: Greater than that of the last record.
            data: At most 512 KiB.
            timeout_s: Deadline.

        Raises:
            grpc.RpcError: The record is not stored (statuses: `monitor.proto`).
        """
        request = pb.KeepRecordRequest(
            id=self._member.id, incarnation=self._incarnation, version=version, data=data
        )
        self._monitors.now.stub.KeepRecord(request, timeout=timeout_s)

    def record(self, timeout_s: float) -> bytes:
        """Read what the last balancer stored at the monitor, to restore its state; empty if there is nothing.

        Raises:
            grpc.RpcError: The monitor does not answer in time.
        """
        request = pb.GetRecordRequest(id=self._member.id)
        return bytes(self._monitors.now.stub.GetRecord(request, timeout=timeout_s).data)

    def close(self, deregister: bool = True) -> None:
        """End the session with the monitor; with `deregister` the member is LEFT at once. Idempotent."""
        with self._calls_lock:
            if self._closed.is_set():
                return
            self._closed.set()
            calls = tuple(self._calls)
        self._due.set()
        for call in calls:
            call.cancel()
        for thread in self._threads:
            # A callback may close its own session.
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)
        if deregister:
            goodbye = pb.DeregisterRequest(
                id=self._member.id, incarnation=self._incarnation, reason="said goodbye"
            )
            try:
                self._monitors.now.stub.Deregister(goodbye, timeout=_GOODBYE_S)
            except grpc.RpcError as error:
                _logger.info("cannot deregister from the monitor: %s", _why(error))
        self._monitors.close()

    # -- the lease -----------------------------------------------------------------------------

    def _register_first(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        backoff = Backoff()
        final = set(_FINAL)
        silent: set[str] = set()
        while True:
            monitor = self._monitors.now
            try:
                return self._register(monitor)
            except grpc.RpcError as error:
                self._monitors.leave(monitor, error)
                pause_s = backoff.next_s()
                final_now = error.code() in final
                # Retry once, because a monitor that has just started may not have published its secret.
                final.add(grpc.StatusCode.UNAUTHENTICATED)
                if final_now or time.monotonic() + pause_s >= deadline:
                    raise self._refused(error) from error
                if monitor.address not in silent:
                    silent.add(monitor.address)
                    _logger.warning(
                        "the monitor at %s refuses or is silent (%s); trying for %.0f s",
                        *(monitor.address, _why(error), timeout_s),
                    )
            time.sleep(pause_s)

    def _refused(self, error: grpc.RpcError) -> ClusterError:
        member, why = self._member, f"{_why(error)}{tls_hint(error)}"
        is_refused = error.code() is grpc.StatusCode.INVALID_ARGUMENT
        # Another field may be what is invalid, such as the id.
        if member.role is Role.FRONTEND and is_refused and "role" in (error.details() or ""):
            why += "; its release knows no frontends: upgrade the monitor first"
        return ClusterError(
            f"cannot register {member.id} with the monitor at {self.monitor_address}: {why}; "
            "check the address and that the monitor runs"
        )

    def _register(self, monitor: MonitorConnection) -> None:
        report = self._report()
        member = replace(
            self._member,
            state=report.state,
            progress=report.progress,
            in_flight=report.in_flight,
            experts=report.experts,
            epoch=report.epoch,
            # Sent with the first heartbeat, so that registrations stay small.
            reach=None if report.reach is None else (),
        )
        request = pb.RegisterRequest(
            member=member.to_proto(),
            previous_incarnation=self._incarnation,
            ended_pids=ended_pids(),
            session=self._session,
        )

        def register(version: int) -> pb.RegisterResponse:
            request.protocol_version = version
            answer: pb.RegisterResponse = monitor.stub.Register(request, timeout=_REGISTER_S)
            return answer

        response = versions.negotiate(versions.CONTROL_PLANE, register)
        try:
            check(response)
        except ValueError as error:
            raise ClusterError(
                f"the monitor at {monitor.address} sends an invalid answer: {error}; "
                "check that this is the cluster's monitor"
            ) from error
        former, self._incarnation = self._incarnation, response.incarnation
        self._lease_s, self._heartbeat_s = response.lease_s, response.heartbeat_s
        if former and former != self._incarnation:
            _logger.warning("%s continues as incarnation %d", member.id, self._incarnation)
            if self._on_new_incarnation:
                _call(self._on_new_incarnation, self._incarnation)

    def _keep_lease(self) -> None:
        backoff = Backoff()
        registered = True
        # Causes logged since the last registration, because each is logged once.
        logged: set[str] = set()
        while not self._closed.is_set():
            monitor = self._monitors.now
            try:
                if not registered:
                    self._register(monitor)
                    registered = True
                    logged.clear()
                    _logger.info("registered again with the monitor at %s", monitor.address)
                self._send_heartbeats(monitor, backoff)
                error_text = "the monitor ended the stream"
            except grpc.RpcError as error:
                error_text = _why(error)
                replaced = error.code() is grpc.StatusCode.ALREADY_EXISTS
                if replaced and error_text not in logged and self._on_replaced:
                    # If the monitor lost its state, this process could continue; if replaced, it cannot.
                    _call(self._on_replaced)
                self._leave(monitor, error)
            except ClusterError as error:
                error_text = str(error)
                self._leave(monitor, error)
            if self._closed.is_set():
                return
            if registered:
                _logger.warning("lost the monitor at %s, retrying: %s", monitor.address, error_text)
            elif error_text not in logged:
                _logger.warning(
                    "not registered with the monitor at %s, retrying: %s",
                    monitor.address,
                    error_text,
                )
            logged.add(error_text)
            registered = False
            self._closed.wait(backoff.next_s())

    def _leave(self, monitor: MonitorConnection, error: Exception) -> None:
        """Switch heartbeats and Watch stream to another monitor, unless the leader itself gave the error."""
        # `close` also cancels the streams, but then deregisters with the leader.
        if not self._closed.is_set() and self._monitors.leave(monitor, error):
            with self._calls_lock:
                # The other thread may have switched already.
                calls = [call for call, to in self._calls.items() if to is monitor]
            for call in calls:
                call.cancel()

    def _send_heartbeats(self, monitor: MonitorConnection, backoff: Backoff) -> None:
        """Send heartbeats until the stream ends, each after the answer to the last one."""
        requests: queue.SimpleQueue[pb.HeartbeatRequest | None] = queue.SimpleQueue()
        sent: tuple[ServerReach, ...] | None = None

        def heartbeat() -> pb.HeartbeatRequest:
            nonlocal sent
            report = self._report()
            request = pb.HeartbeatRequest(
                id=self._member.id,
                incarnation=self._incarnation,
                state=report.state.number,
                progress=report.progress,
                in_flight=report.in_flight,
                experts=report.experts,
                epoch=report.epoch,
                stalled_s=report.stalled_s,
                busy_s=report.busy_s,
                loading_bytes=report.loading_bytes,
                loaded_bytes=report.loaded_bytes,
            )
            if report.reach is not None and report.reach != sent:
                sent = report.reach
                request.reach.CopyFrom(ServerReach.to_proto(sent))
            return request

        def until_late() -> Iterator[pb.HeartbeatRequest]:
            # gRPC reads this on its own thread, which serves as a watchdog: if no heartbeat follows for a
            # whole lease, the monitor has not answered the last one.
            try:
                while request := requests.get(timeout=self._lease_s):
                    yield request
            except queue.Empty:
                call.cancel()

        requests.put(heartbeat())
        with self._tracked(monitor, monitor.stub.Heartbeat(until_late())) as call:
            for answer in call:
                backoff.reset()
                self._confirm(monitor, answer.revision)
                self._due.wait(self._heartbeat_s)
                self._due.clear()
                if self._closed.is_set():
                    break
                requests.put(heartbeat())
            requests.put(None)

    def _confirm(self, monitor: MonitorConnection, revision: int) -> None:
        """Count the monitor's answer with the view's revision as a sign of life of the monitor."""
        watched = self._watched
        if watched is not None and watched[0] is monitor and revision == self.view.revision:
            watched[1].add(pb.WatchResponse(still_at_revision=revision))

    # -- the view ------------------------------------------------------------------------------

    def _keep_view(self) -> None:
        backoff = Backoff()
        was_stopping = False
        logged = ""
        while not self._closed.is_set():
            monitor = self._monitors.now
            position = self._fold.position
            # Heartbeats at a longer interval would not end the stream's silence in time.
            position.heartbeats_tell = self._heartbeat_s <= STREAM_SIGN_S
            try:
                with self._tracked(monitor, monitor.stub.Watch(position)) as call:
                    for response in responses(call):
                        self._watched = monitor, call
                        backoff.reset()
                        if response.WhichOneof("kind") == "stopping":
                            if self._on_stopping and not was_stopping:
                                _call(self._on_stopping)
                            was_stopping = True
                        else:
                            self._fold_in(response)
            except (grpc.RpcError, TimeoutError) as error:
                _logger.debug("watching %s again: %s", monitor.address, _why(error))
                self._leave(monitor, error)
            except ValueError as error:
                if str(error) != logged:
                    logged = str(error)
                    _logger.warning(
                        "the monitor at %s sends an invalid message, watching again: %s",
                        monitor.address,
                        error,
                    )
            self._watched = None
            self._closed.wait(backoff.next_s())

    def _fold_in(self, response: pb.WatchResponse) -> None:
        with self._viewed:
            changed = self._fold.take(response, time.monotonic())
            self._viewed.notify_all()
        if changed and self._on_change:
            _call(self._on_change, self.view)

    @contextlib.contextmanager
    def _tracked(self, monitor: MonitorConnection, call: Any) -> Iterator[Any]:
        """Cancel a call when the block ends, or when the session closes or switches to another monitor."""
        with self._calls_lock:
            self._calls[call] = monitor
            if self._closed.is_set() or monitor is not self._monitors.now:
                call.cancel()
        try:
            yield call
        finally:
            call.cancel()
            with self._calls_lock:
                del self._calls[call]


def _call(callback: Callable[..., None], *args: object) -> None:
    try:
        callback(*args)
    except Exception:
        # An exception of a callback must not end the thread.
        _logger.exception("callback %r failed", callback)


def _why(error: Exception) -> str:
    if isinstance(error, grpc.Call):
        return f"{error.code().name}: {error.details()}"
    return str(error)
