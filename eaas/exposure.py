"""What is open to other machines, and what that takes: TLS, a key, or the word that it is meant."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from eaas.api_keys import ApiKeys
from eaas.config import SecurityConfig
from eaas.errors import ConfigError

if TYPE_CHECKING:
    from eaas.tls import Identity

__all__ = ["guarded_keys", "guarded_port", "identity", "only_here"]


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
