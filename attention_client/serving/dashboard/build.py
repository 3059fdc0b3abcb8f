"""Makes the dashboard of an HTTP endpoint: its source of snapshots, and the operator's buttons."""

from __future__ import annotations

import socket
from collections.abc import Callable

from attention_client.serving.dashboard.mount import Dashboard
from attention_client.serving.dashboard.operator import Operator
from attention_client.serving.dashboard.viewers import OperatorToken, token_of
from eaas.cluster_snapshot import SnapshotReader
from eaas.cluster_snapshot.counters import Counters
from eaas.errors import ConfigError
from eaas.log import get_logger
from eaas.net.api_keys import ApiKeys
from eaas.net.authorisation import OPERATOR
from eaas.net.grpc_server import join_host_port
from eaas.net.listen_policy import only_here
from eaas.net.server_records import cluster_secret, new_secret, publish, withdraw
from eaas.net.tls import Identity
from eaas.types import Member

__all__ = ["build_dashboard"]

_log = get_logger(__name__)


def build_dashboard(
    monitor_address: str,
    host: str,
    port: int,
    members: Callable[[float], list[Member] | None],
    counters: Callable[[float], Counters],
    tls: Identity | None,
    keys: ApiKeys | None,
    *,
    operator_page: bool,
) -> Dashboard:
    """Make the dashboard of the endpoint at this address, and publish the operator's token for `eaas status`.

    Args:
        monitor_address: host:port of the monitor.
        host: Address that the endpoint listens on.
        port: Its port.
        members: Asks the monitor for all members; takes a timeout in seconds.
        counters: Reads the endpoint's counters; takes a timeout in seconds.
        tls: Identity of this process; None: plain text.
        keys: API keys of the endpoint; None: no key is needed.
        operator_page: Show the buttons, if only this machine can connect and no key is needed.
    """
    operator, token = None, None
    address = join_host_port(_numeric(host), port)
    # An API key allows using the model, not operating the cluster.
    if operator_page and keys is None and only_here(host):
        secret = None if tls is not None else cluster_secret(monitor_address)
        shown = token_of(secret) if secret else new_secret()
        try:
            publish(address, shown)
        except ConfigError as error:
            _log.warning("the dashboard has no buttons: %s", error)
        else:
            operator = Operator(Identity(tls.directory, OPERATOR) if tls is not None else None)
            token = OperatorToken(shown, port)
    else:
        withdraw(address)
    return Dashboard(lambda: SnapshotReader(members, counters, tls), operator, token)


def _numeric(host: str) -> str:
    """Resolve the name that an endpoint listens on, as it does itself."""
    found = socket.getaddrinfo(
        host.strip("[]"), 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    return str(found[0][4][0])
