"""Certificates, and an echo server that requires them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from eaas.net.grpc_client import channel
from eaas.net.tls import CA_FILE, Identity
from eaas.types import Role
from eaas_cli.certificates import write_certificates

ECHO = "/eaas.test.Echo/Say"


class Echo(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Echoes requests and records the certificates of its callers."""

    def __init__(self) -> None:
        self.shown: list[bytes] = []

    def service(self, details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(self._say) if details.method == ECHO else None

    def _say(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        self.shown.append(context.auth_context()["x509_pem_cert"][0])
        return request

    def add_to(self, _servicer: object, server: Any) -> None:
        server.add_generic_rpc_handlers((self,))


def say(line: grpc.Channel, message: bytes = b"hello", timeout: float = 10.0) -> bytes:
    answer: bytes = line.unary_unary(ECHO)(message, timeout=timeout)
    return answer


def code_of(call: Callable[[], object]) -> grpc.StatusCode:
    try:
        call()
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


def certificates(directory: Path, days: float = 1) -> Path:
    write_certificates(directory, days=days)
    return directory


def line_to(address: str, directory: Path, role: str, peer: Role = Role.MONITOR) -> grpc.Channel:
    return channel(address, peer.value, Identity(directory, role))


def replace_all(source: Path, target: Path) -> None:
    """Replace every role's certificate and key one file at a time, as `cp` does."""
    for path in sorted(source.iterdir()):
        if path.stem != "ca":
            temporary = target / f".{path.name}"
            shutil.copy2(path, temporary)
            temporary.replace(target / path.name)


def believe(directory: Path, *authorities: Path) -> None:
    """Trust exactly these authorities in a directory from now on."""
    bundle = b"".join((authority / CA_FILE).read_bytes() for authority in authorities)
    temporary = directory / ".bundle"
    temporary.write_bytes(bundle)
    temporary.replace(directory / CA_FILE)
