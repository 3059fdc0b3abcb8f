"""Row 32 of the fault contract: certificates carry roles, and each call admits some roles."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from balancer.service import ROLES as BALANCER_ROLES
from balancer.service import BalancerService
from eaas.net.authorisation import OPERATOR
from eaas.net.grpc_server import Service, serve
from eaas.rpc.v1 import (
    balancer_pb2,
    balancer_pb2_grpc,
    common_pb2,
    expert_pb2,
    expert_pb2_grpc,
)
from eaas.types import ModelShape
from expert_server.experts.placements import PlacementHandler
from expert_server.service import ROLES as EXPERT_ROLES

pytestmark = pytest.mark.integration
DENIED = grpc.StatusCode.PERMISSION_DENIED
SHAPE = ModelShape("tiny", 4, 64, 2, ("l0",), "float32", "digest")


class Authority:
    """Issues certificates for 127.0.0.1."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._key("ca")
        self._run(
            *("req", "-x509", "-new", "-key", "ca.key", "-out", "ca.pem", "-days", "2"),
            *("-subj", "/CN=a cluster"),
        )

    def _run(self, *arguments: str) -> None:
        subprocess.run(
            ["openssl", *arguments], cwd=self._directory, check=True, capture_output=True
        )

    def _key(self, name: str) -> None:
        curve = ("-pkeyopt", "ec_paramgen_curve:P-256")
        self._run("genpkey", "-algorithm", "EC", *curve, "-out", f"{name}.key")

    def issue(self, name: str, role: str) -> tuple[bytes, bytes, bytes]:
        """Root, private key and chain."""
        names = "subjectAltName=IP:127.0.0.1" + (f",URI:eaas://{role}/{name}" if role else "")
        (self._directory / f"{name}.ext").write_text(names)
        self._key(name)
        self._run(
            *("req", "-new", "-key", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        )
        self._run(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key"),
            *("-out", f"{name}.pem", "-days", "2", "-extfile", f"{name}.ext"),
        )
        files = ("ca.pem", f"{name}.key", f"{name}.pem")
        root, key, chain = ((self._directory / file).read_bytes() for file in files)
        return root, key, chain


class Store:
    """Loads nothing and records the requests."""

    count = 0

    def __init__(self) -> None:
        self.told: list[Any] = []

    def digest(self, _layer: int, _expert: int) -> int:
        return 0

    def load(self, wanted: Any, is_given_up: Any, _digests: Any) -> int:
        self.told.append(wanted)
        return 0


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def call_as(authority: Authority, cleanup: ExitStack) -> Callable[[str, str], grpc.Channel]:
    """A channel to an address with a certificate of a role."""

    def connect(role: str, address: str) -> grpc.Channel:
        root, key, chain = authority.issue(f"a-{role or 'nobody'}", role)
        credentials = grpc.ssl_channel_credentials(root, key, chain)
        return cleanup.enter_context(grpc.secure_channel(address, credentials))

    return connect


def serve_tls(authority: Authority, cleanup: ExitStack, service: Service) -> str:
    root, key, chain = authority.issue("server", "expert-server")
    credentials = grpc.ssl_server_credentials([(key, chain)], root, require_client_auth=True)
    server = serve([service], "127.0.0.1", 0, credentials=credentials)
    cleanup.callback(server.stop, 0)
    return server.address


def code_of(call: Callable[..., Any], request: Any) -> grpc.StatusCode:
    try:
        call(request, timeout=10)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


def test_row_32_a_client_pushes_a_placement(
    authority: Authority, call_as: Callable[[str, str], grpc.Channel], cleanup: ExitStack
) -> None:
    """Row 32: valid certificate, wrong role (a client pushes a placement): PERMISSION_DENIED."""
    store = Store()
    handler = PlacementHandler(store, SHAPE, lambda _epoch: None, lambda _epoch: None)  # type: ignore[arg-type]
    names = ("PreparePlacement", "RetirePlacement", "ListExperts")

    class Servicer(expert_pb2_grpc.ExpertServiceServicer):  # type: ignore[misc]
        """The calls that the balancer makes."""

    for name in names:
        setattr(Servicer, name, staticmethod(getattr(handler, name)))
    add = expert_pb2_grpc.add_ExpertServiceServicer_to_server
    service = Service("eaas.rpc.v1.ExpertService", add, Servicer(), EXPERT_ROLES)
    address = serve_tls(authority, cleanup, service)
    push = expert_pb2.PreparePlacementRequest(epoch=9, layers=[common_pb2.Holding(experts=[1])])
    for role in ("attention-client", "expert-server", "monitor", OPERATOR, ""):
        stub = expert_pb2_grpc.ExpertServiceStub(call_as(role, address))
        assert code_of(stub.PreparePlacement, push) is DENIED, role
        assert code_of(stub.Drain, expert_pb2.DrainRequest()) is DENIED, role
    assert store.told == []
    assert handler.epoch == 0
    stub = expert_pb2_grpc.ExpertServiceStub(call_as("balancer", address))
    assert code_of(stub.PreparePlacement, push) is grpc.StatusCode.OK
    assert handler.epoch == 9
    # Without a certificate of this cluster there is no connection.
    plain = cleanup.enter_context(grpc.insecure_channel(address))
    stranger = expert_pb2_grpc.ExpertServiceStub(plain)
    assert code_of(stranger.PreparePlacement, push) is grpc.StatusCode.UNAVAILABLE


def test_row_32_members_do_not_change_placements_at_the_balancer(
    authority: Authority, call_as: Callable[[str, str], grpc.Channel], cleanup: ExitStack
) -> None:
    """Row 32: valid certificate, wrong role: PERMISSION_DENIED. Reading is for everybody."""
    balancer = BalancerService(lambda question: 1, None, None, 1.0, 64)  # type: ignore[arg-type]
    add = balancer_pb2_grpc.add_BalancerServiceServicer_to_server
    service = Service("eaas.rpc.v1.BalancerService", add, balancer, BALANCER_ROLES)
    address = serve_tls(authority, cleanup, service)
    for role in ("attention-client", "expert-server", "balancer"):
        stub = balancer_pb2_grpc.BalancerServiceStub(call_as(role, address))
        for name in BALANCER_ROLES:
            request = getattr(balancer_pb2, f"{name}Request")()
            assert code_of(getattr(stub, name), request) is DENIED, (role, name)
        read = stub.GetPlacement(balancer_pb2.GetPlacementRequest(), timeout=10)
        assert read.placement.epoch == 0
    stub = balancer_pb2_grpc.BalancerServiceStub(call_as(OPERATOR, address))
    scale = balancer_pb2.ScaleRequest(servers=3)
    assert code_of(stub.Scale, scale) is grpc.StatusCode.FAILED_PRECONDITION, (
        "nobody starts servers"
    )


def test_every_call_that_changes_something_is_guarded() -> None:
    methods = balancer_pb2.DESCRIPTOR.services_by_name["BalancerService"].methods
    reading = {"GetPlacement", "WatchPlacement", "Plan", "GetHotness", "History"}
    assert {m.name for m in methods} == BALANCER_ROLES.keys() | reading | {"GetScale", "WatchScale"}


def test_every_call_of_an_expert_server_is_guarded() -> None:
    methods = expert_pb2.DESCRIPTOR.services_by_name["ExpertService"].methods
    assert {m.name for m in methods} == EXPERT_ROLES.keys()
