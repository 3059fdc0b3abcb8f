"""gRPC server of balancer and expert server, and parts of the monitor's: services, health and reflection."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from eaas.errors import ConfigError, PortInUseError
from eaas.net import server_records
from eaas.net.authorisation import RoleGuard
from eaas.net.grpc_client import MESSAGE_BYTES
from eaas.net.grpc_secret import SecretGuard
from eaas.net.request_validation import RequestGuard
from eaas.open_files import room_for_connections

__all__ = [
    "METADATA_BYTES",
    "STREAMS",
    "RunningServer",
    "Service",
    "add_port",
    "check_port",
    "host_to_tell",
    "join_host_port",
    "port_error",
    "serve",
    "server_options",
]

STREAMS = 32
"""Limit of concurrent calls per connection; further calls wait at the client.

A burst of calls that are refused or reset (CVE-2023-44487) holds the interpreter for 0.1 ms each: with 64 the
p99 of honest layer calls under attack was 2.6 times the usual one, with 32 it is 1.5 to 2.1 times. Not fewer:
with 16, a connection whose many calls were malformed or cancelled had all later calls refused.
"""

METADATA_BYTES = 8 << 10
"""Limit of the headers of one call."""

_HANDSHAKE_S = 10

_OPTIONS = (
    # With reuse (the default) a second server would silently take the same port and half of the calls.
    ("grpc.so_reuseport", 0),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    # Above the first limit gRPC refuses some calls at random, above the second all calls.
    ("grpc.max_metadata_size", METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", METADATA_BYTES),
    # Keepalive: closes connections of silent peers.
    ("grpc.server_handshake_timeout_ms", 1000 * _HANDSHAKE_S),
    # Windows are fixed, so that no pings measure the bandwidth and idle processes stay idle.
    ("grpc.http2.bdp_probe", 0),
    # A stream of a lost peer must not hold its worker thread for ever.
    ("grpc.keepalive_time_ms", 10_000),
    # A client without calls reads its sockets only every 5 s.
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Clients ping every 10 s; the default limit (5 minutes) would disconnect them.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
)


def server_options(message_bytes: int, streams: int = STREAMS) -> list[tuple[str, int]]:
    """gRPC options of every server.

    Args:
        message_bytes: Larger messages are refused with RESOURCE_EXHAUSTED before they are read.
        streams: Concurrent calls per connection.
    """
    return [
        *_OPTIONS,
        # Further connections are closed at once, because the process needs its other file descriptors.
        ("grpc.max_allowed_incoming_connections", room_for_connections()),
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.max_concurrent_streams", streams),
    ]


@dataclass(frozen=True)
class Service:
    """One gRPC service, and the roles that may call it.

    Attributes:
        name: Full name ("eaas.rpc.v1.MonitorService").
        add: The generated `add_...Servicer_to_server`.
        servicer: Object whose methods handle the calls.
        roles: Allowed roles of restricted methods (see `RoleGuard`).
    """

    name: str
    add: Callable[[Any, Any], None]
    servicer: object
    roles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class RunningServer:
    """A running gRPC server. Its health is NOT_SERVING until `set_serving(True)`.

    Attributes:
        address: host:port for clients; the machine's host name if the server listens on all interfaces.
        serving: The health that probes get.
    """

    serving = False

    def __init__(
        self,
        server: Any,
        workers: futures.Executor,
        health_servicer: Any,
        services: Sequence[str],
        address: str,
    ) -> None:
        self._server = server
        self._workers = workers
        self._health = health_servicer
        self._services = ("", *services)
        self.address = address
        self.set_serving(False)

    def set_serving(self, serving: bool) -> None:
        """Set the health that probes get, for the whole server ("") and for each service."""
        self.serving = serving
        status = health_pb2.HealthCheckResponse
        for name in self._services:
            self._health.set(name, status.SERVING if serving else status.NOT_SERVING)

    def stop(self, grace_s: float) -> None:
        """Stop the server: refuse new calls, and cancel running ones after `grace_s` seconds. Blocks."""
        self.serving = False
        self._health.enter_graceful_shutdown()
        self._server.stop(grace_s).wait()
        self._workers.shutdown(wait=False)


def serve(
    services: Sequence[Service],
    host: str,
    port: int,
    max_workers: int = 64,
    credentials: grpc.ServerCredentials | None = None,
    message_bytes: int = MESSAGE_BYTES,
    secret: str | None = None,
) -> RunningServer:
    """Start a gRPC server with `services`, health and reflection.

    Args:
        services: Services of this process.
        host: Name or address to listen on; "0.0.0.0" or "::" means all interfaces.
        port: 0 picks a free port (see `RunningServer.address`).
        max_workers: Concurrent calls, running streams included. More are refused with RESOURCE_EXHAUSTED at
            once: queued calls would only reach their deadlines.
        credentials: For TLS; None means plain text.
        message_bytes: Larger messages are refused.
        secret: Callers must present it (see `eaas.net.server_records`); None means no check.

    Raises:
        PortInUseError: Another process uses the port.
        ConfigError: The host is not on this machine, the port needs more rights, or the secret cannot be
            published for this user's other processes.
    """
    workers = futures.ThreadPoolExecutor(max_workers, thread_name_prefix="grpc")
    roles = {f"/{s.name}/{name}": allowed for s in services for name, allowed in s.roles.items()}
    guards = (RoleGuard(roles), RequestGuard())
    server = grpc.server(
        workers,
        interceptors=(SecretGuard(secret), *guards) if secret else guards,
        options=server_options(message_bytes),
        maximum_concurrent_rpcs=max_workers,
    )
    names = [service.name for service in services]
    for service in services:
        service.add(service.servicer, server)
    health_servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection(
        (*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server
    )
    address = add_port(server, host, port, credentials, secret)
    server.start()
    return RunningServer(server, workers, health_servicer, names, address)


def add_port(
    server: Any,
    host: str,
    port: int,
    credentials: grpc.ServerCredentials | None = None,
    secret: str | None = None,
    *,
    keep: bool = False,
) -> str:
    """Bind a gRPC server to a port; return host:port for clients. Raises the errors of `serve`.

    The secret is published for this user's other processes (`keep`: see `server_records.ServerRecord`). None
    removes the record of an earlier process.
    """
    listen_host = _listen_host(host, port)
    try:
        where = join_host_port(listen_host, port)
        if credentials is None:
            bound = server.add_insecure_port(where)
        else:
            bound = server.add_secure_port(where, credentials)
    except RuntimeError as error:
        # gRPC gives no cause, but a plain bind does. If that succeeds, the port was in use a moment ago.
        code = _try_bind(listen_host, port) or errno.EADDRINUSE
        raise port_error(code, host, port) from error
    address = join_host_port(host_to_tell(listen_host), bound)
    if secret is None:
        server_records.withdraw(address)
    else:
        server_records.publish(address, secret, keep=keep)
    return address


def check_port(host: str, port: int) -> None:
    """Check that a gRPC server could listen on a port now, before the expert server loads its model.

    Raises:
        PortInUseError: Another process uses the port.
        ConfigError: The host is not on this machine, or the port needs more rights.
    """
    code = _try_bind(_listen_host(host, port), port)
    if code:
        raise port_error(code, host, port)


def host_to_tell(host: str) -> str:
    """The host that a listener tells its clients; the machine's name if it listens on all interfaces."""
    return socket.gethostname() if host in ("0.0.0.0", "::") else host


def join_host_port(host: str, port: int) -> str:
    """Write `host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _listen_host(host: str, port: int) -> str:
    # gRPC binds all addresses of a name and succeeds if one works, so that a port in use on 127.0.0.1 but
    # free on ::1 would go unnoticed.
    host = host.removeprefix("[").removesuffix("]")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ConfigError(
            f"cannot listen on {join_host_port(host, port)}: {error.strerror}"
        ) from error
    addresses = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)
    return str(addresses[0][4][0])


def _try_bind(listen_host: str, port: int) -> int:
    """Try to bind a socket to a host and port; return the errno, 0 for success."""
    family = socket.AF_INET6 if ":" in listen_host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((listen_host, port))
            probe.listen()
        except OSError as error:
            return error.errno or errno.EADDRINUSE
    return 0


def port_error(code: int, host: str, port: int) -> Exception:
    """Make the error of a port that cannot be listened on: PortInUseError or ConfigError, by the errno."""
    where = join_host_port(host, port)
    if code == errno.EADDRINUSE:
        return PortInUseError(
            f"{where} is in use: choose another port, or stop the process that uses it"
        )
    return ConfigError(f"cannot listen on {where}: {os.strerror(code)}; change host or port")
