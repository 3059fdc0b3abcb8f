"""Rows 31 and 33 of the fault contract, and row 32 at the monitor: certificates and their roles."""

from __future__ import annotations

import itertools
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from control_plane import Plane, eventually, registration
from eaas.config import MonitorConfig
from eaas.errors import ClusterError
from eaas.membership.monitors import Monitors, ask_members
from eaas.membership.session import MemberSession, Report
from eaas.net.grpc_aio_server import serve_aio
from eaas.net.grpc_client import channel
from eaas.net.grpc_server import Service, serve
from eaas.net.tls import Identity
from eaas.rpc.v1 import monitor_pb2 as pb
from eaas.rpc.v1 import monitor_pb2_grpc
from eaas.types import Member, MemberState, Role
from eaas_cli.certificates import issue_again
from eaas_cli.chaos.cluster import free_port
from monitor.main import Monitor
from tls_world import Echo, believe, certificates, code_of, line_to, replace_all, say

pytestmark = pytest.mark.integration

REFUSED = grpc.StatusCode.UNAVAILABLE
DENIED = grpc.StatusCode.PERMISSION_DENIED
PATIENCE_S = 30.0


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return certificates(tmp_path / "tls")


async def _echo(request: bytes, _context: Any) -> bytes:
    return request


class AioEcho(grpc.GenericRpcHandler):  # type: ignore[misc]
    def service(self, _details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(_echo)


@pytest.fixture(params=["threads", "loop"])
def address(request: pytest.FixtureRequest, directory: Path, cleanup: ExitStack) -> str:
    """The address of a monitor's port, served by threads or by an event loop."""
    credentials = Identity(directory, "monitor").server_credentials()
    if request.param == "threads":
        service = Service("eaas.test.Echo", Echo().add_to, None)
        server: Any = serve([service], "127.0.0.1", 0, credentials=credentials)
    else:
        server = serve_aio(
            "eaas.test.Echo",
            lambda it: it.add_generic_rpc_handlers((AioEcho(),)),
            "127.0.0.1",
            0,
            max_calls=100,
            message_bytes=1 << 20,
            streams=10,
            credentials=credentials,
        )
    cleanup.callback(server.stop, 0)
    return str(server.address)


def test_row_31_no_expired_or_wrong_name_certificate(
    address: str, directory: Path, tmp_path: Path, cleanup: ExitStack
) -> None:
    """Row 31: no, expired or wrong-name certificate: handshake refused."""

    def outcome(line: grpc.Channel) -> grpc.StatusCode:
        with line:
            return code_of(lambda: say(line))

    assert outcome(line_to(address, directory, "expert-server")) is grpc.StatusCode.OK
    # None: in plain text, and over TLS.
    assert outcome(channel(address)) is REFUSED
    authority = (directory / "ca.pem").read_bytes()
    name = (("grpc.ssl_target_name_override", "monitor.eaas.internal"),)
    nobody = grpc.ssl_channel_credentials(authority)
    assert outcome(grpc.secure_channel(address, nobody, name)) is REFUSED
    # Of another authority: the server refuses the client, and the client the server.
    other = certificates(tmp_path / "other")
    assert outcome(line_to(address, other, "expert-server")) is REFUSED
    believe(other, other, directory)
    assert outcome(line_to(address, other, "expert-server")) is REFUSED
    # Expired.
    issue_again(directory, days=-1)
    assert outcome(line_to(address, directory, "operator")) is REFUSED
    issue_again(directory, days=1)
    # The wrong name: what is at the address is no balancer.
    assert outcome(line_to(address, directory, "operator", Role.BALANCER)) is REFUSED
    assert outcome(line_to(address, directory, "operator")) is grpc.StatusCode.OK


def test_row_31_a_members_certificate_does_not_make_it_the_monitor(
    directory: Path, cleanup: ExitStack
) -> None:
    """Row 31: wrong-name certificate: handshake refused. Here the server's own is the wrong one."""
    for role in ("expert-server", "balancer", "attention-client", "frontend", "operator"):
        credentials = Identity(directory, role).server_credentials()
        service = Service("eaas.test.Echo", Echo().add_to, None)
        server = serve([service], "127.0.0.1", 0, credentials=credentials)
        cleanup.callback(server.stop, 0)
        with line_to(server.address, directory, "expert-server", Role.MONITOR) as line:
            assert code_of(lambda line=line: say(line)) is REFUSED, role


def test_row_33_certificates_rotated_under_load(
    address: str, directory: Path, tmp_path: Path, cleanup: ExitStack
) -> None:
    """Row 33: certificates rotated under load: 0 failed calls. The authority, too, by a bundle."""
    stop, failures, calls = threading.Event(), [], itertools.count()

    def load(reconnect: bool) -> None:
        own = Identity(directory, "attention-client")
        line = channel(address, Role.MONITOR.value, own)
        while not stop.is_set():
            try:
                assert say(line) == b"hello"
                next(calls)
            except grpc.RpcError as error:
                failures.append(error)
            if reconnect:
                line.close()
                line = channel(address, Role.MONITOR.value, own)
        line.close()

    threads = [threading.Thread(target=load, args=(again,)) for again in (False, True)]
    for thread in threads:
        thread.start()

    def some_calls() -> None:
        wanted = next(calls) + 40
        eventually(lambda: next(calls) >= wanted)

    try:
        old, new = tmp_path / "old", certificates(tmp_path / "new")
        old.mkdir()
        (old / "ca.pem").write_bytes((directory / "ca.pem").read_bytes())
        some_calls()
        issue_again(directory, days=1)
        some_calls()
        believe(directory, old, new)
        some_calls()
        replace_all(new, directory)
        some_calls()
        believe(directory, new)
        some_calls()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert failures == []
    # New connections no longer accept certificates of the old authority.
    for name in ("operator.pem", "operator.key"):
        assert (directory / name).read_bytes() == (new / name).read_bytes()
    stranger = certificates(tmp_path / "stranger")
    believe(stranger, new)
    with line_to(address, stranger, "operator") as line:
        assert code_of(lambda: say(line)) is REFUSED
    with line_to(address, new, "operator") as line:
        assert say(line) == b"hello"


def test_row_33_new_connections_show_the_new_certificate_and_old_ones_live(
    directory: Path, cleanup: ExitStack
) -> None:
    """Row 33: certificates rotated under load: 0 failed calls."""
    echo = Echo()
    credentials = Identity(directory, "monitor").server_credentials()
    service = Service("eaas.test.Echo", echo.add_to, None)
    server = serve([service], "127.0.0.1", 0, credentials=credentials)
    cleanup.callback(server.stop, 0)
    line = cleanup.enter_context(line_to(server.address, directory, "balancer"))
    say(line)
    first = (directory / "balancer.pem").read_bytes()
    issue_again(directory, days=1)
    second = (directory / "balancer.pem").read_bytes()
    say(line)
    with line_to(server.address, directory, "balancer") as later:
        say(later)
    say(line)
    assert [pem.split() for pem in echo.shown] == [p.split() for p in (first, first, second, first)]


# -- at the monitor -----------------------------------------------------------------------------------


@pytest.fixture
def monitor(directory: Path, plane: Plane) -> Monitor:
    return plane.monitor(tls=Identity(directory, "monitor"))


def member(member_id: str, role: Role) -> Member:
    return Member(member_id, role, 1, "h", "127.0.0.1:1", MemberState.SERVING)


def test_row_32_nobody_registers_as_what_it_is_not(
    monitor: Monitor, directory: Path, cleanup: ExitStack
) -> None:
    """Row 32: valid certificate, wrong role: PERMISSION_DENIED."""
    stubs = {
        role: monitor_pb2_grpc.MonitorServiceStub(
            cleanup.enter_context(line_to(monitor.address, directory, role))
        )
        for role in ("expert-server", "attention-client", "frontend", "balancer", "operator")
    }

    def register(holder: str, what: Member) -> grpc.StatusCode:
        request = registration(what.id, what.role)
        return code_of(lambda: stubs[holder].Register(request))

    for role in (Role.EXPERT_SERVER, Role.ATTENTION_CLIENT, Role.FRONTEND, Role.BALANCER):
        for holder in stubs:
            wanted = grpc.StatusCode.OK if holder == role.value else DENIED
            assert register(holder, member(f"a-{role.value}", role)) is wanted, (holder, role)
    assert register("expert-server", member("a-monitor", Role.MONITOR)) is DENIED
    # A certificate cannot speak for a member of another role either.
    assert register("expert-server", member("a-balancer", Role.EXPERT_SERVER)) is DENIED
    goodbye = pb.DeregisterRequest(id="a-balancer", incarnation=1)
    assert code_of(lambda: stubs["expert-server"].Deregister(goodbye)) is DENIED
    beat = pb.HeartbeatRequest(id="a-balancer", incarnation=1, state=MemberState.SERVING.number)
    beats = stubs["expert-server"].Heartbeat(iter([beat]), timeout=10)
    assert code_of(lambda: list(beats)) is DENIED
    record = pb.KeepRecordRequest(id="a-balancer", incarnation=1, version=1)
    report = pb.ReportOutcomeRequest(client_id="a-attention-client", client_incarnation=1)
    for holder in stubs.keys() - {"balancer"}:
        assert code_of(lambda h=holder: stubs[h].KeepRecord(record)) is DENIED
        read = pb.GetRecordRequest(id="a-balancer")
        assert code_of(lambda h=holder, r=read: stubs[h].GetRecord(r)) is DENIED
    for holder in stubs.keys() - {"attention-client"}:
        assert code_of(lambda h=holder: stubs[h].ReportOutcome(report)) is DENIED
    # Every role may read.
    for stub in stubs.values():
        assert next(stub.Watch(pb.WatchRequest(), timeout=10)).snapshot.members
    monitors = Monitors(monitor.address, Identity(directory, "operator"))
    cleanup.callback(monitors.close)
    states = {m.id: m.state for m in ask_members(monitors, 10)}
    assert states["a-balancer"] is not MemberState.DEAD


def test_a_member_that_is_cut_off_comes_back_with_its_new_certificate(
    directory: Path, tmp_path: Path, cleanup: ExitStack
) -> None:
    """A channel does not read its certificate again; the session does."""
    port = free_port("127.0.0.1")
    config = MonitorConfig(port=port)
    first = Monitor(config, tls=Identity(directory, "monitor"))
    session = MemberSession(
        first.address,
        member("server", Role.EXPERT_SERVER),
        report=lambda: Report(MemberState.SERVING),
        tls=Identity(directory, "expert-server"),
    )
    cleanup.callback(session.close)
    assert session.wait_for(lambda view: "server" in view.members, PATIENCE_S)
    first.stop()
    # While no monitor listens, the authority and all certificates are replaced.
    new = certificates(tmp_path / "new")
    believe(directory, new)
    replace_all(new, directory)
    second = Monitor(config, tls=Identity(directory, "monitor"))
    cleanup.callback(second.stop)
    monitors = Monitors(second.address, Identity(directory, "operator"))
    cleanup.callback(monitors.close)
    eventually(lambda: "server" in {m.id for m in ask_members(monitors, 10)})


def test_an_unknown_certificate_is_refused_with_the_reason(
    monitor: Monitor, tmp_path: Path
) -> None:
    stranger = Identity(certificates(tmp_path / "stranger"), "expert-server")
    for tls, why in (
        (stranger, "cannot register server .*CERTIFICATE_VERIFY_FAILED"),
        (None, "cannot register server"),
    ):
        with pytest.raises(ClusterError, match=why):
            MemberSession(
                monitor.address,
                member("server", Role.EXPERT_SERVER),
                report=lambda: Report(MemberState.SERVING),
                register_timeout_s=1.0,
                tls=tls,
            )
