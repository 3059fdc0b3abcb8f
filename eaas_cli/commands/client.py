"""`eaas status` and `eaas generate`: commands that call the HTTP endpoint of a running cluster."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from eaas.counted import counted
from eaas.errors import ClusterError
from eaas.net.api_keys import authorization
from eaas.net.http_client import http_settings
from eaas.net.server_records import OPERATOR_PATH, find
from eaas_cli.commands.options import DEFAULT_ENDPOINT, Endpoint, Json, KeyToShow, Tls
from eaas_cli.commands.servers import operator
from eaas_cli.endpoint import (
    ANSWER_S,
    base_url,
    check,
    fetch_status,
    live_members,
    reason,
    unreachable_error,
)
from eaas_cli.local.running_clusters import name_cluster

__all__ = [
    "STATE_COLOURS",
    "generate",
    "page_address",
    "status",
    "status_table",
    "unreachable_text",
]

_UNKNOWN = "-"
# Largest number of uncovered experts that the table names.
_NAMED = 6
# Longest wait for the next token of a stream, many times a layer's deadline.
_TOKEN_S = 120.0
STATE_COLOURS = {
    "SERVING": "green",
    "JOINING": "cyan",
    "DRAINING": "cyan",
    "SUSPECT": "yellow",
    "DEAD": "red",
    "LEFT": "dim",
}


def _frontend_of(endpoint: str, document: dict[str, Any]) -> str:
    """URL of the frontend that has the page: the endpoint, unless its status document comes from vLLM."""
    frontends = [f"http://{member['address']}" for member in live_members(document, "frontend")]
    return endpoint if not frontends or document["endpoint"] in frontends else frontends[0]


def page_address(endpoint: str) -> str:
    """URL of the dashboard for a command to print, with the operator's token if this user may read it.

    The token is never printed to a file that other users can read.
    """
    import httpx

    page = f"{base_url(endpoint)}/"
    record = find(httpx.URL(page).netloc.decode())
    if record is None or not record.lives or _is_log():
        return page
    return f"{base_url(endpoint)}{OPERATOR_PATH}{record.secret}/"


def _is_log() -> bool:
    """Whether standard output is a file that other users can read: then the operator's token is left out."""
    try:
        fd = sys.stdout.fileno()
        mode = os.fstat(fd).st_mode
        places = Path(os.readlink(f"/proc/self/fd/{fd}")).parents
        open_to_others = all(place.stat().st_mode & 0o011 for place in places)
    except OSError:
        # Standard output has no file name, or the file was deleted.
        return False
    return stat.S_ISREG(mode) and bool(mode & 0o044) and open_to_others


def status_table(document: dict[str, Any]) -> Any:
    """Build the members table of `eaas status` and `eaas up` from the status document; prints nothing."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from eaas.types import MemberState, Role

    coverage = document["coverage"]
    uncovered = [f"{layer}/{expert}" for layer, expert in coverage["uncovered"]]
    covered = f"at least {coverage['min_replicas']} live"
    if "min_nodes" in coverage:
        covered += f", on {counted(coverage['min_nodes'], 'node')}"
    if not document["epoch"]:
        covered = "not placed yet"
    elif uncovered:
        more = ", ..." if len(uncovered) > _NAMED else ""
        names = ", ".join(uncovered[:_NAMED])
        covered = f"{len(uncovered)} uncovered (layer/expert {names}{more})"
    table = Table(
        title=f"{document['endpoint']}   epoch {document['epoch']}   experts: {covered}",
        title_justify="left",
        box=None,
    )
    # Long names and addresses fold in a narrow terminal; the other columns are never cut off.
    table.add_column("MEMBER", overflow="fold")
    for column in ("STATE", "PID"):
        table.add_column(column, no_wrap=True)
    table.add_column("ADDRESS", overflow="fold")
    for column in ("LIFE", "EXPERTS", "IN FLIGHT"):
        table.add_column(column, justify="right", no_wrap=True)
    for member in document["members"]:
        state, is_server = member["state"], member["role"] == Role.EXPERT_SERVER.value
        table.add_row(
            member["id"],
            Text(state, style=STATE_COLOURS.get(state, "")),
            str(member["pid"]),
            member["address"],
            str(member["incarnation"]),
            str(member["experts"]) if is_server else _UNKNOWN,
            str(member["in_flight"]) if not MemberState(state).is_gone else _UNKNOWN,
        )
    # Endpoints of former releases leave out `unreachable`.
    cut = [(m["id"], m["unreachable"]) for m in document["members"] if m.get("unreachable")]
    notes = [Text(f"{server}: {unreachable_text(reasons)}", style="red") for server, reasons in cut]
    return Group(table, *notes) if notes else table


def unreachable_text(reasons: Mapping[str, str]) -> str:
    """Describe which clients cannot reach a server, and why, for a table. `reasons` are by client id."""
    return "; ".join(f"unreachable for {client}: {why}" for client, why in reasons.items())


def status(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    key_file: KeyToShow = None,
    tls: Tls = None,
    as_json: Json = False,
) -> None:
    """Show the members of a cluster and whether every expert has a live replica."""
    document = fetch_status(endpoint, key_file)
    if tls is not None:
        # The endpoint needs no certificate; a wrong --tls is an error, as in the commands that need one.
        operator(endpoint, document, tls)
    if as_json:
        typer.echo(json.dumps(document))
        return
    from eaas_cli.console import table_console

    console = table_console()
    console.print(status_table(document))
    page = page_address(_frontend_of(endpoint, document))
    if console.is_terminal and OPERATOR_PATH in page:
        typer.echo(f"page: {page}")


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum number of tokens to generate.")
    ] = 64,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=2.0,
            help="0: always the likeliest token.",
            show_default="the model's",
        ),
    ] = None,
    key_file: KeyToShow = None,
    as_json: Json = False,
) -> None:
    """Complete a prompt and print the tokens as they arrive."""
    import httpx

    from eaas_cli.bench.stream import Events

    body: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "stream": not as_json}
    if temperature is not None:
        body["temperature"] = temperature
    url = f"{base_url(endpoint)}/v1/completions"
    timeout = httpx.Timeout(ANSWER_S, read=_TOKEN_S)
    headers = authorization(key_file)
    try:
        with httpx.Client(**http_settings(url), headers=headers, timeout=timeout) as http:
            if as_json:
                response = http.post(url, json=body)
                check(response)
                name_cluster(endpoint)
                typer.echo(json.dumps(response.json()))
                return
            with http.stream("POST", url, json=body) as response:
                if response.is_error:
                    response.read()
                check(response)
                name_cluster(endpoint)
                events = Events()
                for piece in response.iter_bytes():
                    for chunk in events.feed(piece):
                        _print_chunk(chunk)
        typer.echo()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ClusterError(unreachable_error(endpoint, error)) from error


def _print_chunk(chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        raise ClusterError(f"the stream broke off: {reason(chunk)}")
    for choice in chunk["choices"]:
        sys.stdout.write(choice.get("text") or "")
    sys.stdout.flush()
