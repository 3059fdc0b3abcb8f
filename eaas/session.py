"""A process's membership: it registers, sends heartbeats, and knows the other members.

None of it is on the data path: with the monitor away the last view stays, for any time, and the
session comes back by itself when the monitor does.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc

from eaas import versions
from eaas.errors import ClusterError
from eaas.grpc_client import MOST_WAITING, STREAM_SIGN_S, Backoff, responses
from eaas.local.child import ended_pids
from eaas.log import get_logger
from eaas.member_ids import check_id
from eaas.membership import MembershipFold, MembershipView
from eaas.message_check import check
from eaas.monitors import MonitorLine, Monitors, tls_hint
from eaas.placement_watch import PlacementWatch
from eaas.rpc.v1 import monitor_pb2 as pb
from eaas.tls import Identity
from eaas.types import Member, MemberState, ServerReach

__all__ = ["PROTOCOL_VERSION", "MemberSession", "MembershipView", "PlacementWatch", "Report"]

_logger = get_logger(__name__)

PROTOCOL_VERSION = versions.CONTROL_PLANE.newest
"""The newest version of the control plane's contract that this release speaks."""

_REGISTER_S = 2.0
_REPORT_S = 1.0
_GOODBYE_S = 1.0
_JOIN_S = 3.0
# Refused for good: asking again cannot help.
_FINAL = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
)


@dataclass(frozen=True)
class Report:
    """What a member says of itself in each heartbeat (fields: `eaas.types.Member`).

    Attributes:
        stalled_s: For how long the work at hand has been overdue and has not moved; 0 while it moves.
        busy_s: For how long it has been at work since it began; only ever rises.
        reach: Sent when it has changed.
    """

    state: MemberState
    progress: int = 0
    in_flight: int = 0
    experts: int = 0
    epoch: int = 0
    stalled_s: float = 0.0
    busy_s: float = 0.0
    reach: tuple[ServerReach, ...] | None = None


class MemberSession:
    """Registers at once, then keeps the lease and the view alive from daemon threads.

    Callbacks run on the session's threads and must not block; a failing one is logged.

    Args:
        monitor_address: host:port of the monitor; "host:port,host:port" where there are several.
        member: This process; state and counters come from `report`.
        report: Read for each heartbeat.
        on_change: Called with each new view in which a member differs from the view before.
        on_stopping: Called once, when the operator stops the cluster.
        on_new_incarnation: Called when the former life had ended and a new one has begun.
        on_replaced: Called when the former life has ended and none begins: another process has the id now.
        register_timeout_s: How long to try to register first.
        tls: Who this process is to the monitor; None: plain text.

    Raises:
        ConfigError: No member can have this id.
        ClusterError: The first registration failed; names the address and the cause.
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
        self._lease_s = self._heartbeat_s = 0.0
        self._fold = MembershipFold()
        self._viewed = threading.Condition()
        self._closed = threading.Event()
        self._due = threading.Event()
        self._calls_lock = threading.Lock()
        # The running streams, each with the monitor that it goes to.
        self._calls: dict[Any, MonitorLine] = {}
        # The monitor whose watch stream has begun to speak, and where what it says is taken from.
        self._watched: tuple[MonitorLine, queue.Queue[pb.WatchResponse]] | None = None
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
        """The newest view; empty, of infinite age, until the monitor's first snapshot."""
        return self._fold.view

    @property
    def incarnation(self) -> int:
        """This process's present life, as the monitor named it."""
        return self._incarnation

    @property
    def heartbeat_s(self) -> float:
        """How often the monitor wants to hear of this process."""
        return self._heartbeat_s

    def report_outcomes(self, outcomes: Sequence[pb.ServerOutcomes]) -> bool:
        """Tells the monitor how requests to servers ended. Says whether it took it; blocks up to 1 s."""
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
        """Sends a heartbeat without waiting for its turn (the state changed)."""
        self._due.set()

    def wait_for(
        self, wanted: Callable[[MembershipView], bool], timeout_s: float
    ) -> MembershipView | None:
        """Blocks until a view is as wanted and returns it; None once the time is over."""
        with self._viewed:
            found = self._viewed.wait_for(lambda: wanted(self.view), timeout_s)
            return self.view if found else None

    def ask_members(self, timeout_s: float) -> dict[str, Member] | None:
        """The members with their loads of this moment; None if the monitor does not answer in time.

        The view has no fresh loads: they change all the time, and nobody is woken for them.
        """
        # Which monitor is asked is for the streams to decide.
        try:
            members = self._monitors.now.members(timeout_s)
        except grpc.RpcError as error:
            _logger.debug("the monitor was not asked: %s", _why(error))
            return None
        return None if members is None else {m.id: m for m in members}

    def keep_record(self, version: int, data: bytes, timeout_s: float) -> None:
        """Leaves something to whoever comes after this member under its name.

        Args:
            version: Above that of the last one.
            data: 512 KiB at most.
            timeout_s: Longest wait for the monitor's store.

        Raises:
            grpc.RpcError: It is not kept (`monitor.proto` says what each status means).
        """
        request = pb.KeepRecordRequest(
            id=self._member.id, incarnation=self._incarnation, version=version, data=data
        )
        self._monitors.now.stub.KeepRecord(request, timeout=timeout_s)

    def record(self, timeout_s: float) -> bytes:
        """What was left last under this member's name; empty where nothing was.

        Raises:
            grpc.RpcError: The monitor does not answer in time.
        """
        request = pb.GetRecordRequest(id=self._member.id)
        return bytes(self._monitors.now.stub.GetRecord(request, timeout=timeout_s).data)

    def close(self, deregister: bool = True) -> None:
        """Ends the session.

        With `deregister` the member is LEFT for the others at once. Idempotent.
        """
        with self._calls_lock:
            if self._closed.is_set():
                return
            self._closed.set()
            calls = tuple(self._calls)
        self._due.set()
        for call in calls:
            call.cancel()
        for thread in self._threads:
            # A callback may close the session that called it.
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)
        if deregister:
            goodbye = pb.DeregisterRequest(
                id=self._member.id, incarnation=self._incarnation, reason="said goodbye"
            )
            try:
                self._monitors.now.stub.Deregister(goodbye, timeout=_GOODBYE_S)
            except grpc.RpcError as error:
                _logger.info("no goodbye to the monitor: %s", _why(error))
        self._monitors.close()

    # -- the lease -----------------------------------------------------------------------------

    def _register_first(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        backoff = Backoff()
        final = set(_FINAL)
        while True:
            line = self._monitors.now
            try:
                return self._register(line)
            except grpc.RpcError as error:
                self._monitors.leave(line, error)
                pause_s = backoff.next_s()
                final_now = error.code() in final
                # Once it may be that the monitor was about to leave its secret.
                final.add(grpc.StatusCode.UNAUTHENTICATED)
                if final_now or time.monotonic() + pause_s >= deadline:
                    raise ClusterError(
                        f"cannot register {self._member.id} with the monitor at "
                        f"{self.monitor_address}: {_why(error)}{tls_hint(error)}; "
                        "check the address and that the monitor runs"
                    ) from error
            time.sleep(pause_s)

    def _register(self, line: MonitorLine) -> None:
        report = self._report()
        member = replace(
            self._member,
            state=report.state,
            progress=report.progress,
            in_flight=report.in_flight,
            experts=report.experts,
            epoch=report.epoch,
            # Empty for now: a member is small. The first heartbeat says more.
            reach=None if report.reach is None else (),
        )
        request = pb.RegisterRequest(
            member=member.to_proto(),
            previous_incarnation=self._incarnation,
            ended_pids=ended_pids(),
        )

        def register(version: int) -> pb.RegisterResponse:
            request.protocol_version = version
            answer: pb.RegisterResponse = line.stub.Register(request, timeout=_REGISTER_S)
            return answer

        response = versions.negotiate(versions.CONTROL_PLANE, register)
        try:
            check(response)
        except ValueError as error:
            raise ClusterError(
                f"the monitor at {line.address} gives an answer that cannot be: {error}; "
                "check that this is the cluster's monitor"
            ) from error
        former, self._incarnation = self._incarnation, response.incarnation
        self._lease_s, self._heartbeat_s = response.lease_s, response.heartbeat_s
        if former and former != self._incarnation:
            _logger.warning("%s lives on as incarnation %d", member.id, self._incarnation)
            if self._on_new_incarnation:
                _call(self._on_new_incarnation, self._incarnation)

    def _keep_lease(self) -> None:
        backoff = Backoff()
        registered = True
        # Since it was registered: each cause is told once, and not with every attempt.
        told: set[str] = set()
        while not self._closed.is_set():
            line = self._monitors.now
            try:
                if not registered:
                    self._register(line)
                    registered = True
                    told.clear()
                    _logger.info("registered again with the monitor at %s", line.address)
                self._send_heartbeats(line, backoff)
                error_text = "the monitor ended the stream"
            except grpc.RpcError as error:
                error_text = _why(error)
                replaced = error.code() is grpc.StatusCode.ALREADY_EXISTS
                if replaced and error_text not in told and self._on_replaced:
                    # A life that is not known may go on (the monitor forgot everything); this one cannot.
                    _call(self._on_replaced)
                self._leave(line, error)
            except ClusterError as error:
                error_text = str(error)
                self._leave(line, error)
            if self._closed.is_set():
                return
            if registered:
                _logger.warning("lost the monitor at %s, trying on: %s", line.address, error_text)
            elif error_text not in told:
                _logger.warning(
                    "not registered with the monitor at %s, trying on: %s", line.address, error_text
                )
            told.add(error_text)
            registered = False
            self._closed.wait(backoff.next_s())

    def _leave(self, line: MonitorLine, error: Exception) -> None:
        """Turns to another monitor, with both streams: the other thread would wait for nothing."""
        # The end cancels the streams, too, and the goodbye is for the leader.
        if not self._closed.is_set() and self._monitors.leave(line, error):
            with self._calls_lock:
                # The other thread may be there already.
                calls = [call for call, to in self._calls.items() if to is line]
            for call in calls:
                call.cancel()

    def _send_heartbeats(self, line: MonitorLine, backoff: Backoff) -> None:
        """Sends heartbeats, each once the last was answered, until the stream ends."""
        requests: queue.SimpleQueue[pb.HeartbeatRequest | None] = queue.SimpleQueue()
        told: tuple[ServerReach, ...] | None = None

        def heartbeat() -> pb.HeartbeatRequest:
            nonlocal told
            report = self._report()
            request = self._heartbeat(report)
            if report.reach is not None and report.reach != told:
                told = report.reach
                request.reach.CopyFrom(ServerReach.to_proto(told))
            return request

        def until_late() -> Iterator[pb.HeartbeatRequest]:
            # gRPC reads this on a thread of its own, which is the watchdog too: no next heartbeat
            # for a whole lease means that the monitor does not answer the last one.
            try:
                while request := requests.get(timeout=self._lease_s):
                    yield request
            except queue.Empty:
                call.cancel()

        requests.put(heartbeat())
        with self._tracked(line, line.stub.Heartbeat(until_late())) as call:
            for answer in call:
                backoff.reset()
                self._confirm(line, answer.revision)
                self._due.wait(self._heartbeat_s)
                self._due.clear()
                if self._closed.is_set():
                    break
                requests.put(heartbeat())
            requests.put(None)

    def _confirm(self, line: MonitorLine, revision: int) -> None:
        """An answer that names the view's revision is a sign of life: the view is not stale."""
        watched = self._watched
        if watched is not None and watched[0] is line and revision == self.view.revision:
            # A full inbox has signs of life enough.
            with contextlib.suppress(queue.Full):
                watched[1].put_nowait(pb.WatchResponse(still_at_revision=revision))

    def _heartbeat(self, report: Report) -> pb.HeartbeatRequest:
        return pb.HeartbeatRequest(
            id=self._member.id,
            incarnation=self._incarnation,
            state=report.state.number,
            progress=report.progress,
            in_flight=report.in_flight,
            experts=report.experts,
            epoch=report.epoch,
            stalled_s=report.stalled_s,
            busy_s=report.busy_s,
        )

    # -- the view ------------------------------------------------------------------------------

    def _keep_view(self) -> None:
        backoff = Backoff()
        told_to_stop = False
        nonsense = ""
        while not self._closed.is_set():
            line = self._monitors.now
            inbox: queue.Queue[pb.WatchResponse] = queue.Queue(MOST_WAITING)
            position = self._fold.position
            # Rarer heartbeats would not break the stream's silence in time.
            position.heartbeats_tell = self._heartbeat_s <= STREAM_SIGN_S
            try:
                with self._tracked(line, line.stub.Watch(position)) as call:
                    for response in responses(call, inbox=inbox):
                        self._watched = line, inbox
                        backoff.reset()
                        if response.WhichOneof("kind") == "stopping":
                            if self._on_stopping and not told_to_stop:
                                _call(self._on_stopping)
                            told_to_stop = True
                        else:
                            self._take(response)
            except (grpc.RpcError, TimeoutError) as error:
                _logger.debug("watching %s again: %s", line.address, _why(error))
                self._leave(line, error)
            except ValueError as error:
                if str(error) != nonsense:
                    nonsense = str(error)
                    _logger.warning(
                        "the monitor at %s says what cannot be, watching again: %s",
                        line.address,
                        error,
                    )
            self._watched = None
            self._closed.wait(backoff.next_s())

    def _take(self, response: pb.WatchResponse) -> None:
        with self._viewed:
            changed = self._fold.take(response, time.monotonic())
            self._viewed.notify_all()
        if changed and self._on_change:
            _call(self._on_change, self.view)

    @contextlib.contextmanager
    def _tracked(self, line: MonitorLine, call: Any) -> Iterator[Any]:
        """Cancels the call at the end, or as soon as the session closes or turns to another monitor."""
        with self._calls_lock:
            self._calls[call] = line
            if self._closed.is_set() or line is not self._monitors.now:
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
        # The owner's mistake must not end the thread that keeps its lease or its view.
        _logger.exception("callback %r failed", callback)


def _why(error: Exception) -> str:
    if isinstance(error, grpc.Call):
        return f"{error.code().name}: {error.details()}"
    return str(error)
