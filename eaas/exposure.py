"""What is open to other machines, and what that takes: TLS, a key, or the word that it is meant."""

from __future__ import annotations

import ipaddress
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from eaas import server_records
from eaas.api_keys import ApiKeys
from eaas.config import MonitorConfig, SecurityConfig
from eaas.errors import ConfigError

if TYPE_CHECKING:
    from eaas.tls import Identity

__all__ = [
    "guarded_keys",
    "guarded_port",
    "identity",
    "member_secret",
    "monitor_secret",
    "only_here",
]

_MONITOR_S = 10.0
_LOOK_S = 0.1


def identity(security: SecurityConfig, role: str) -> Identity | None:
    """Who a process is to others; None where there is no TLS. Raises ConfigError (`Identity`)."""
    if not security.tls_dir:
        return None
    # Not at the top: `eaas --help` gets by without gRPC.
    from eaas.tls import Identity

    return Identity(Path(security.tls_dir), role)


def guarded_port(security: SecurityConfig, role: str, host: str) -> Identity | None:
    """Who a process that listens for others of its cluster is; None where there is no TLS.

    Raises:
        ConfigError: Other machines could connect and there is no TLS; or `Identity` cannot be made.
    """
    known = identity(security, role)
    if known is None and not security.insecure and not only_here(host):
        raise ConfigError(
            f"--host {host} lets other machines connect, and nothing asks who they are: give --tls DIR "
            "(`eaas certs DIR` makes certificates), or --insecure if the network is yours alone"
        )
    return known


def monitor_secret(security: SecurityConfig, monitor: MonitorConfig) -> str | None:
    """What calls to a monitor have to show: a secret on loopback without TLS; None: nothing.

    Raises:
        ConfigError: There is no directory that only this user can use.
    """
    if security.tls_dir or security.insecure or not only_here(monitor.host):
        return None
    if monitor.store == "zookeeper":
        return server_records.shared_secret(f"{monitor.zookeeper_hosts}{monitor.zookeeper_root}")
    host = monitor.host.strip("[]")
    return server_records.monitor_secret(f"{host}:{monitor.port}")


def member_secret(monitor_address: str, host: str, tls: Identity | None) -> str | None:
    """What calls to a balancer or an expert server have to show: what its monitor asks for.

    Args:
        monitor_address: "host:port", or "host:port,host:port" where there are several.
        host: Where the process listens. One that other machines can reach was told `--insecure`.
        tls: Who the process is; None: plain text.
    """
    if tls is not None or not only_here(host):
        return None
    # A process that starts before its monitor must not serve strangers meanwhile: it waits for as long as it
    # would try to register.
    addresses = [address.strip() for address in monitor_address.split(",")]
    deadline = time.monotonic() + _MONITOR_S
    secret, listens = server_records.cluster_secret(monitor_address), False
    while secret is None and not listens and time.monotonic() < deadline:
        listens = any(map(_listens, addresses))
        # A monitor that listens since a moment is about to leave its secret.
        time.sleep(_LOOK_S)
        secret = server_records.cluster_secret(monitor_address)
    return secret


def guarded_keys(security: SecurityConfig, host: str, file: str) -> ApiKeys | None:
    """What requests to the endpoint have to show; None: nothing.

    Raises:
        ConfigError: Other machines could use the endpoint and there is no key; or `ApiKeys` cannot be made.
    """
    keys = ApiKeys.of(file)
    if keys is None and not security.insecure and not only_here(host):
        raise ConfigError(
            f"--host {host} lets other machines use the endpoint, and nothing asks who they are: give "
            "--api-key-file FILE or EAAS_API_KEY, or --insecure if the network is yours alone"
        )
    return keys


def only_here(host: str) -> bool:
    """Whether only this machine can connect to what listens there."""
    try:
        found = socket.getaddrinfo(
            host.strip("[]"), 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except socket.gaierror:
        # Nobody can listen there, and whoever tries says so.
        return True
    return all(ipaddress.ip_address(address[4][0]).is_loopback for address in found)


def _listens(address: str) -> bool:
    """Whether a process listens at host:port; another machine is not asked."""
    host, _, port = address.rpartition(":")
    if not only_here(host):
        return True
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
    except (OSError, ValueError):
        return False
    return True
