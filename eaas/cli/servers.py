"""Commands that change how many expert servers a running cluster has."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eaas.cli.client import GONE, fetch_status
from eaas.cli.options import DEFAULT_ENDPOINT, Endpoint, KeyToShow, Tls
from eaas.errors import ClusterError, ConfigError
from eaas.last_up import up_at
from eaas.words import counted

if TYPE_CHECKING:
    from eaas.balancer_client import BalancerClient
    from eaas.tls import Identity

__all__ = ["balancer_address", "monitor_addresses", "operator", "register"]

_LOOK_S = 0.2
# For each server that comes or goes: it loads its experts, or others load them.
_SERVER_S = 300.0
# Without an answer; a busy endpoint may leave out one or another.
_PATIENCE_S = 30.0


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("scale")(scale)
    app.command("drain")(drain)


def scale(
    servers: Annotated[int, typer.Argument(help="Expert servers that there are to be.")],
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    key_file: KeyToShow = None,
    tls: Tls = None,
) -> None:
    """Start expert servers of a cluster of `eaas up`, or have some leave, one at a time; requests go on."""
    from eaas.balancer_client import BalancerClient

    document = fetch_status(endpoint, key_file)
    before = len(_servers(document))
    with BalancerClient(balancer_address(document), operator(endpoint, document, tls)) as balancer:
        wish = balancer.scale(servers)

        def has_so_many(now: dict[str, Any]) -> bool:
            members = _servers(now)
            # One that serves may hold nothing: there are more servers than replicas.
            if len(members) == servers and all(m["state"] == "SERVING" for m in members):
                return True
            _check_wish(balancer, wish, servers)
            return False

        otherwise = f"there are not {counted(servers, 'server')}"
        _wait(document, endpoint, key_file, has_so_many, otherwise, 1 + abs(servers - before))


def _check_wish(balancer: BalancerClient, wish: int, servers: int) -> None:
    """Raises ClusterError where it is known that there will not be so many servers."""
    try:
        now = balancer.scale_state()
    except ClusterError:
        # Another balancer may be about to take over; the launcher goes on.
        return
    if now.wish > wish:
        raise ClusterError(f"not {counted(servers, 'server')}: another number was asked for since")
    if now.wish == wish and now.refusal:
        raise ClusterError(f"not {counted(servers, 'server')}: {now.refusal}")


def drain(
    server: Annotated[str, typer.Argument(help="Its name in `eaas status`.", show_default=False)],
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    key_file: KeyToShow = None,
    tls: Tls = None,
) -> None:
    """Have an expert server leave: others take its experts over, then it ends; requests go on."""
    from eaas.balancer_client import BalancerClient

    document = fetch_status(endpoint, key_file)
    with BalancerClient(balancer_address(document), operator(endpoint, document, tls)) as balancer:
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
    """The expert servers that live."""
    members = document["members"]
    return [m for m in members if m["role"] == "expert-server" and m["state"] not in GONE]


def balancer_address(document: dict[str, Any]) -> str:
    """Of the balancer that lives. Raises ClusterError where none does."""
    for member in document["members"]:
        if member["role"] == "balancer" and member["state"] not in GONE:
            return str(member["address"])
    raise ClusterError("no balancer lives in this cluster: start one with `eaas balancer --join`")


def monitor_addresses(endpoint: str, document: dict[str, Any]) -> list[str]:
    """Of the monitors that live. Raises ClusterError where none does.

    Args:
        endpoint: URL of the cluster's endpoint.
        document: Its status.
    """
    found = [
        str(member["address"])
        for member in document["members"]
        if member["role"] == "monitor" and member["state"] not in GONE
    ]
    if not found:
        raise ClusterError(f"{endpoint}: no monitor is in the cluster, so there is nobody to ask")
    return found


def operator(endpoint: str, document: dict[str, Any], directory: Path | None) -> Identity | None:
    """What a person's command shows to the cluster; None where it has no TLS.

    Args:
        endpoint: URL of the cluster's endpoint.
        document: Its status.
        directory: Of certificates; None: the command line names none.

    Raises:
        ConfigError: The cluster has TLS and there are no certificates to show, or the other way round.
    """
    # An attention client of another version does not say.
    has_tls = document.get("tls", directory is not None)
    if not has_tls:
        if directory is not None:
            raise ConfigError(f"{endpoint}: this cluster has no TLS: leave out --tls {directory}")
        return None
    from eaas.authority import OPERATOR
    from eaas.tls import CA_FILE, Identity

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
) -> None:
    """Print what members come to until it is done; `before`: the status before anything was asked for."""
    deadline = time.monotonic() + servers * _SERVER_S
    told: dict[str, str] = {m["id"]: m["state"] for m in before["members"]}
    heard_at = time.monotonic()
    while True:
        try:
            document = fetch_status(endpoint, key_file)
        except ClusterError:
            if time.monotonic() > heard_at + _PATIENCE_S:
                raise
            time.sleep(_LOOK_S)
            continue
        heard_at = time.monotonic()
        for member in document["members"]:
            name, state = member["id"], member["state"]
            # Also one that was not there before, whatever it has become between two looks.
            if member["role"] == "expert-server" and told.get(name) != state:
                typer.echo(f"{name}: {state}")
                told[name] = state
        if is_done(document):
            return
        if time.monotonic() > deadline:
            raise ClusterError(f"after {servers * _SERVER_S:.0f} s {otherwise}: see `eaas status`")
        time.sleep(_LOOK_S)
