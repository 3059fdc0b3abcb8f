"""Row 32 of the fault contract: certificates carry roles, and each call admits some roles."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from balancer.service import ROLES as BALANCER_ROLES
from balancer.service import BalancerService
from eaas.net.authorisation import OPERATOR
from eaas.net.grpc_server import Service, serve
from eaas.net.tls import CA_FILE, Identity
from eaas.rpc.v1 import (
    balancer_pb2,
    balancer_pb2_grpc,
    common_pb2,
    expert_pb2,
    expert_pb2_grpc,
)
from eaas.types import ModelShape, Role
from eaas_cli.certificates import CA_KEY_FILE
from expert_server.experts.placements import PlacementHandler
from expert_server.service import ROLES as EXPERT_ROLES
from tls_world import certificates, code_of, line_to

pytestmark = pytest.mark.integration
DENIED = grpc.StatusCode.PERMISSION_DENIED
NOBODY = "nobody"
SHAPE = ModelShape("tiny", 4, 64, 2, ("l0",), "float32", "digest")


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
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates for each role, and one of the same authority that names none."""
    directory = certificates(tmp_path_factory.mktemp("tls"))
    authority = x509.load_pem_x509_certificate((directory / CA_FILE).read_bytes())
    signer = serialization.load_pem_private_key((directory / CA_KEY_FILE).read_bytes(), None)
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        x509.CertificateBuilder(authority.subject, public_key=key.public_key(), serial_number=9)
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NOBODY)]))
        .not_valid_before(authority.not_valid_before_utc)
        .not_valid_after(authority.not_valid_after_utc)
        .sign(signer, hashes.SHA256())  # type: ignore[arg-type]
    )
    pem = serialization.Encoding.PEM
    (directory / f"{NOBODY}.pem").write_bytes(certificate.public_bytes(pem))
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (directory / f"{NOBODY}.key").touch(mode=0o600)
    (directory / f"{NOBODY}.key").write_bytes(key.private_bytes(pem, *plain))
    return directory


@pytest.fixture
def call_as(directory: Path, cleanup: ExitStack) -> Callable[[str, str], grpc.Channel]:
    """A channel to an address with a certificate of a role."""
    return lambda role, address: cleanup.enter_context(
        line_to(address, directory, role, Role.EXPERT_SERVER)
    )


def serve_tls(directory: Path, cleanup: ExitStack, service: Service) -> str:
    credentials = Identity(directory, "expert-server").server_credentials()
    server = serve([service], "127.0.0.1", 0, credentials=credentials)
    cleanup.callback(server.stop, 0)
    return server.address


def code(call: Callable[..., Any], request: Any) -> grpc.StatusCode:
    return code_of(lambda: call(request, timeout=10))


def test_row_32_a_client_pushes_a_placement(
    directory: Path, call_as: Callable[[str, str], grpc.Channel], cleanup: ExitStack
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
    address = serve_tls(directory, cleanup, service)
    push = expert_pb2.PreparePlacementRequest(epoch=9, layers=[common_pb2.Holding(experts=[1])])
    for role in ("attention-client", "frontend", "expert-server", "monitor", OPERATOR, NOBODY):
        stub = expert_pb2_grpc.ExpertServiceStub(call_as(role, address))
        assert code(stub.PreparePlacement, push) is DENIED, role
        assert code(stub.Drain, expert_pb2.DrainRequest()) is DENIED, role
    assert store.told == []
    assert handler.epoch == 0
    stub = expert_pb2_grpc.ExpertServiceStub(call_as("balancer", address))
    assert code(stub.PreparePlacement, push) is grpc.StatusCode.OK
    assert handler.epoch == 9
    # Without a certificate of this cluster there is no connection.
    plain = cleanup.enter_context(grpc.insecure_channel(address))
    stranger = expert_pb2_grpc.ExpertServiceStub(plain)
    assert code(stranger.PreparePlacement, push) is grpc.StatusCode.UNAVAILABLE


def test_row_32_members_do_not_change_placements_at_the_balancer(
    directory: Path, call_as: Callable[[str, str], grpc.Channel], cleanup: ExitStack
) -> None:
    """Row 32: valid certificate, wrong role: PERMISSION_DENIED. Reading is for everybody."""
    balancer = BalancerService(lambda question: 1, None, None, 1.0, 64)  # type: ignore[arg-type]
    add = balancer_pb2_grpc.add_BalancerServiceServicer_to_server
    service = Service("eaas.rpc.v1.BalancerService", add, balancer, BALANCER_ROLES)
    address = serve_tls(directory, cleanup, service)
    for role in ("attention-client", "frontend", "expert-server", "balancer"):
        stub = balancer_pb2_grpc.BalancerServiceStub(call_as(role, address))
        for name in BALANCER_ROLES:
            request = getattr(balancer_pb2, f"{name}Request")()
            assert code(getattr(stub, name), request) is DENIED, (role, name)
        read = stub.GetPlacement(balancer_pb2.GetPlacementRequest(), timeout=10)
        assert read.placement.epoch == 0
    stub = balancer_pb2_grpc.BalancerServiceStub(call_as(OPERATOR, address))
    scale = balancer_pb2.ScaleRequest(servers=3)
    assert code(stub.Scale, scale) is grpc.StatusCode.FAILED_PRECONDITION, "nobody starts servers"


def test_every_call_that_changes_something_is_guarded() -> None:
    methods = balancer_pb2.DESCRIPTOR.services_by_name["BalancerService"].methods
    reading = {"GetPlacement", "WatchPlacement", "Plan", "GetHotness", "History"}
    assert {m.name for m in methods} == BALANCER_ROLES.keys() | reading | {"GetScale", "WatchScale"}


def test_every_call_of_an_expert_server_is_guarded() -> None:
    methods = expert_pb2.DESCRIPTOR.services_by_name["ExpertService"].methods
    assert {m.name for m in methods} == EXPERT_ROLES.keys()
