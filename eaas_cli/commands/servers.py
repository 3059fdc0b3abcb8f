"""`eaas scale` and `eaas drain`: change the number of expert servers in a running cluster."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eaas.counted import counted
from eaas.errors import ClusterError, ConfigError
from eaas_cli.commands.options import DEFAULT_ENDPOINT, Endpoint, KeyToShow, Tls
from eaas_cli.endpoint import fetch_status, live_members
from eaas_cli.local.running_clusters import name_cluster, up_at

if TYPE_CHECKING:
    from eaas.control_plane.balancer_client import BalancerClient
    from eaas.net.tls import Identity

__all__ = [
    "POLL_S",
    "SILENCE_S",
    "balancer_address",
    "balancer_of",
    "drain",
    "monitor_addresses",
    "operator",
    "scale",
]

POLL_S = 0.2
"""Interval of the polls of a command that waits."""
SILENCE_S = 30.0
"""Longest time without an answer. A busy endpoint may miss some polls."""
# Deadline per server that joins or leaves. It includes the loading of experts.
_SERVER_S = 300.0


def scale(
    servers: Annotated[
        int, typer.Argument(min=0, max=2**31 - 1, help="Wanted number of expert servers.")
    ],
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    key_file: KeyToShow = None,
    tls: Tls = None,
) -> None:
    """Start or stop expert servers under `eaas up`, one at a time; requests continue."""
    document = fetch_status(endpoint, key_file)
    before = len(_servers(document))
    with balancer_of(endpoint, document, tls) as balancer:
        request = balancer.scale(servers)

        def is_scaled(now: dict[str, Any]) -> bool:
            members = _servers(now)
            # A server without experts counts, because there may be more servers than replicas.
            if len(members) == servers and all(m["state"] == "SERVING" for m in members):
                return True
            _check_request(balancer, request, servers)
            return False

        otherwise = f"there are not {counted(servers, 'server')}"
        if not _wait(document, endpoint, key_file, is_scaled, otherwise, 1 + abs(servers - before)):
            typer.echo(f"nothing to do: the cluster has {counted(servers, 'server')}")


def _check_request(balancer: BalancerClient, request: int, servers: int) -> None:
    """Raise ClusterError if the balancer replaced or refused the scale request, which ends `eaas scale`."""
    try:
        now = balancer.scale_state()
    except ClusterError:
        # Keep waiting: another balancer may take over, and the launcher continues.
        return
    if now.wish > request:
        raise ClusterError(
            f"not {counted(servers, 'server')}: a later request asked for another number"
        )
    if now.wish == request and now.refusal:
        raise ClusterError(f"not {counted(servers, 'server')}: {now.refusal}")


def drain(
    server: Annotated[
        str, typer.Argument(help="Server id, as in `eaas status`.", show_default=False)
    ],
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    key_file: KeyToShow = None,
    tls: Tls = None,
) -> None:
    """Remove an expert server: others load its experts, then it ends; requests continue."""
    document = fetch_status(endpoint, key_file)
    with balancer_of(endpoint, document, tls) as balancer:
        balancer.drain(server)
        fewest = balancer.scale_state().fewest
    staying = [m for m in _servers(document) if m["state"] != "DRAINING" and m["id"] != server]
    if len(staying) < fewest:
        typer.echo(
            f"note: {counted(len(staying), 'server')} cannot hold each expert on {fewest}, as "
            "balancer.redundancy wants: start another one",
            err=True,
        )

    def has_left(now: dict[str, Any]) -> bool:
        return server not in {m["id"] for m in _servers(now)}

    _wait(document, endpoint, key_file, has_left, f"{server} has not left", 1)


def _servers(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Select the live expert servers from a status document, whether they serve or not."""
    return live_members(document, "expert-server")


def balancer_of(endpoint: str, document: dict[str, Any], tls: Path | None) -> BalancerClient:
    """Connect to the balancer of a status document's cluster, and name the cluster on standard error.

    Raises:
        ClusterError: No balancer lives.
        ConfigError: As `operator`.
    """
    from eaas.control_plane.balancer_client import BalancerClient

    own, address = operator(endpoint, document, tls), balancer_address(endpoint, document)
    name_cluster(endpoint)
    return BalancerClient(address, own)


def balancer_address(endpoint: str, document: dict[str, Any]) -> str:
    """Find the live balancer's address in a status document, for a call to it by a command or `eaas up`.

    Raises ClusterError: there is none.
    """
    for member in live_members(document, "balancer"):
        return str(member["address"])
    monitors = ",".join(str(m["address"]) for m in live_members(document, "monitor")) or "HOST:PORT"
    raise _none_lives(endpoint, document, "balancer", f"`eaas balancer --join {monitors}`")


def monitor_addresses(endpoint: str, document: dict[str, Any]) -> list[str]:
    """Find the live monitors' addresses in a status document, for `eaas top` and `eaas autoscale`.

    Raises ClusterError: there is none.
    """
    found = [str(member["address"]) for member in live_members(document, "monitor")]
    if not found:
        raise _none_lives(endpoint, document, "monitor", "`eaas monitor` at the same address")
    return found


def _none_lives(endpoint: str, document: dict[str, Any], role: str, command: str) -> ClusterError:
    """Build the error for a role without a live process: where it was, and what starts it again."""
    former = [m for m in document["members"] if m["role"] == role]
    states = ", ".join(f"pid {m['pid']} at {m['address']} is {m['state']}" for m in former)
    up = up_at(endpoint)
    if up is None:
        remedy = f"start it again with {command}"
    elif up.on_ray:
        remedy = "Ray starts it again: try again in a minute"
    else:
        remedy = "start it again with the command that `eaas up` printed when it ended"
        if former:
            remedy += f", or `kill -CONT {former[-1]['pid']}` if it was stopped"
    return ClusterError(
        f"{endpoint}: this cluster has no live {role}{states and f' ({states})'}: {remedy}"
    )


def operator(endpoint: str, document: dict[str, Any], directory: Path | None) -> Identity | None:
    """Load the operator's TLS identity for calls to the cluster; None for a cluster without TLS.

    Args:
        directory: Directory of certificates (--tls), if given.

    Raises:
        ConfigError: The cluster has TLS and --tls is missing, or the other way round.
    """
    # Status documents of former releases leave out `tls`.
    has_tls = document.get("tls", directory is not None)
    if not has_tls:
        if directory is not None:
            raise ConfigError(f"{endpoint}: this cluster has no TLS: leave out --tls {directory}")
        return None
    from eaas.net.authorisation import OPERATOR
    from eaas.net.tls import CA_FILE, Identity

    if directory is not None:
        return Identity(directory, OPERATOR)
    up = up_at(endpoint)
    where = shlex.quote(up.tls_dir) if up is not None else "DIR"
    raise ConfigError(
        f"{endpoint}: this cluster asks for certificates: give --tls {where}, the directory with "
        f"{CA_FILE}, {OPERATOR}.pem and {OPERATOR}.key"
    )


def _wait(
    before: dict[str, Any],
    endpoint: str,
    key_file: Path | None,
    is_done: Callable[[dict[str, Any]], bool],
    otherwise: str,
    servers: int,
) -> bool:
    """Poll the status and print servers' changes until `is_done`. `before`: status before the request.

    Returns:
        Whether a server changed.

    Raises ClusterError: not done in time (`otherwise` says what is missing), or the endpoint is silent.
    """
    deadline = time.monotonic() + servers * _SERVER_S
    printed: dict[str, str] = {m["id"]: m["state"] for m in before["members"]}
    changed = False
    heard_at = time.monotonic()
    while True:
        try:
            document = fetch_status(endpoint, key_file)
        except ClusterError:
            if time.monotonic() > heard_at + SILENCE_S:
                raise
            time.sleep(POLL_S)
            continue
        heard_at = time.monotonic()
        for member in document["members"]:
            name, state = member["id"], member["state"]
            if member["role"] == "expert-server" and printed.get(name) != state:
                typer.echo(f"{name}: {state}")
                printed[name] = state
                changed = True
        if is_done(document):
            return changed
        if time.monotonic() > deadline:
            raise ClusterError(f"after {servers * _SERVER_S:.0f} s {otherwise}: see `eaas status`")
        time.sleep(POLL_S)
