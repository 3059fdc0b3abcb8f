"""Listen policy: other machines may connect only with TLS, an API key, or an explicit --insecure."""

from __future__ import annotations

import ipaddress
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from eaas.errors import ConfigError
from eaas.log import get_logger
from eaas.net import server_records
from eaas.net.api_keys import ApiKeys

if TYPE_CHECKING:
    from eaas.config import MonitorConfig, SecurityConfig
    from eaas.net.tls import Identity

__all__ = [
    "guarded_keys",
    "guarded_port",
    "identity",
    "member_secret",
    "monitor_secret",
    "only_here",
]

_logger = get_logger(__name__)
_MONITOR_S = 10.0
_POLL_S = 0.1


def identity(security: SecurityConfig, role: str) -> Identity | None:
    """Load the process's TLS identity; None without TLS. Raises ConfigError (see `Identity`)."""
    if not security.tls_dir:
        return None
    # Imported here, because `eaas --help` needs no gRPC.
    from eaas.net.tls import Identity

    return Identity(Path(security.tls_dir), role)


def guarded_port(security: SecurityConfig, role: str, host: str) -> Identity | None:
    """Check the gRPC host against the policy; return the TLS identity, None without TLS.

    Raises:
        ConfigError: Other machines could connect without TLS, or `Identity` failed.
    """
    known = identity(security, role)
    if known is None and not security.insecure and not only_here(host):
        raise ConfigError(
            f"--host {host} lets other machines connect without authentication: give --tls DIR "
            "(`eaas certs DIR` makes certificates), or --insecure if the network is yours alone"
        )
    return known


def monitor_secret(security: SecurityConfig, monitor: MonitorConfig) -> str | None:
    """Return the secret that callers of a monitor on loopback without TLS must present; else None.

    Raises:
        ConfigError: There is no directory private to this user.
    """
    if security.tls_dir or security.insecure or not only_here(monitor.host):
        return None
    if monitor.store == "zookeeper":
        return server_records.shared_secret(f"{monitor.zookeeper_hosts}{monitor.zookeeper_root}")
    host = monitor.host.strip("[]")
    return server_records.monitor_secret(f"{host}:{monitor.port}")


def member_secret(monitor_address: str, host: str, tls: Identity | None) -> str | None:
    """Return the secret that callers of a balancer or expert server must present: that of its monitor.

    Args:
        monitor_address: "host:port", or "host:port,host:port" for several monitors.
        host: Host to listen on.
        tls: Identity of the process; None means plain text.
    """
    if tls is not None or not only_here(host):
        return None
    # A process that starts before its monitor must not serve without the secret. It waits for as long as it
    # would try to register.
    addresses = [address.strip() for address in monitor_address.split(",")]
    deadline = time.monotonic() + _MONITOR_S
    secret, listens, waits = server_records.cluster_secret(monitor_address), False, False
    while secret is None and not listens and time.monotonic() < deadline:
        listens = any(map(_listens, addresses))
        if not listens and not waits:
            waits = True
            _logger.warning("no monitor listens at %s yet: waiting for it", monitor_address)
        # A monitor publishes its secret just after it starts to listen.
        time.sleep(_POLL_S)
        secret = server_records.cluster_secret(monitor_address)
    return secret


def guarded_keys(security: SecurityConfig, host: str, file: str) -> ApiKeys | None:
    """Check the endpoint's host against the policy; return its API keys, None without keys.

    Raises:
        ConfigError: Other machines could use the endpoint without a key, or `ApiKeys` failed.
    """
    keys = ApiKeys.of(file)
    if keys is None and not security.insecure and not only_here(host):
        raise ConfigError(
            f"--host {host} lets other machines use the endpoint without authentication: give "
            "--api-key-file FILE or EAAS_API_KEY, or --insecure if the network is yours alone"
        )
    return keys


def only_here(host: str) -> bool:
    """Whether only this machine's processes can connect to this host; if not, it needs TLS or keys."""
    try:
        found = socket.getaddrinfo(
            host.strip("[]"), 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except socket.gaierror:
        # An unknown host fails later, when the process binds it.
        return True
    return all(ipaddress.ip_address(address[4][0]).is_loopback for address in found)


def _listens(address: str) -> bool:
    """Whether a process listens at host:port; assumed True for other machines."""
    host, _, port = address.rpartition(":")
    if not only_here(host):
        return True
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
    except (OSError, ValueError):
        return False
    return True
