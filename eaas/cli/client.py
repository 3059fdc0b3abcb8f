"""Commands that talk to a running cluster's HTTP endpoint."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from eaas.api_keys import authorization
from eaas.cli.options import DEFAULT_ENDPOINT, Endpoint, Json, KeyToShow
from eaas.errors import ClusterError
from eaas.last_up import latest_up
from eaas.server_records import OPERATOR_PATH, find

__all__ = [
    "GONE",
    "STATE_COLOURS",
    "fetch_status",
    "page_address",
    "register",
    "status_table",
    "unreachable_text",
]

_STATUS_S = 5.0
_PIPED_WIDTH = 160
# Of the experts that no live server holds.
_NAMED = 6
# Between two tokens of a stream: a layer's whole deadline, many times over.
_TOKEN_S = 120.0
STATE_COLOURS = {
    "SERVING": "green",
    "JOINING": "cyan",
    "DRAINING": "cyan",
    "SUSPECT": "yellow",
    "DEAD": "red",
    "LEFT": "dim",
}
# Of members that are no more.
GONE = ("DEAD", "LEFT")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("status")(status)
    app.command("generate")(generate)


def fetch_status(endpoint: str, key_file: Path | None = None) -> dict[str, Any]:
    """The status document of a cluster.

    Args:
        endpoint: Its URL.
        key_file: With the key to show; None: the environment's, or none.

    Raises:
        ClusterError: Nobody answers, or the key is not one of the endpoint's.
        ConfigError: There is no key in the file.
    """
    headers = authorization(key_file)
    try:
        url = f"{_base(endpoint)}/eaas/v1/status"
        response = httpx.get(url, headers=headers, timeout=_STATUS_S)
        if response.status_code == httpx.codes.UNAUTHORIZED:
            _check(response)
        response.raise_for_status()
        document: dict[str, Any] = response.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ClusterError(_unreachable(endpoint, error)) from error
    return document


def page_address(endpoint: str) -> str:
    """Of the dashboard's page; with the operator's token where this user may have it.

    The token does not get into a log: a file that others can read.
    """
    page = f"{_base(endpoint)}/"
    record = find(httpx.URL(page).netloc.decode())
    if record is None or not record.lives or _is_log():
        return page
    return f"{_base(endpoint)}{OPERATOR_PATH}{record.secret}/"


def _is_log() -> bool:
    """Whether what is printed goes to a file that other users can read."""
    try:
        fd = sys.stdout.fileno()
        mode = os.fstat(fd).st_mode
        places = Path(os.readlink(f"/proc/self/fd/{fd}")).parents
        open_to_others = all(place.stat().st_mode & 0o011 for place in places)
    except OSError:
        # No file that has a name, or none that is there any more.
        return False
    return stat.S_ISREG(mode) and bool(mode & 0o044) and open_to_others


def status_table(document: dict[str, Any]) -> Any:
    """The status document as a table for people (a Rich renderable)."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    coverage = document["coverage"]
    uncovered = [f"{layer}/{expert}" for layer, expert in coverage["uncovered"]]
    covered = f"at least {coverage['min_replicas']} live"
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
    for column in ("MEMBER", "STATE", "PID", "ADDRESS"):
        table.add_column(column)
    for column in ("LIFE", "EXPERTS", "IN FLIGHT"):
        table.add_column(column, justify="right")
    for member in document["members"]:
        state = member["state"]
        table.add_row(
            member["id"],
            Text(state, style=STATE_COLOURS.get(state, "")),
            str(member["pid"]),
            member["address"],
            str(member["incarnation"]),
            str(member["experts"]),
            str(member["in_flight"]),
        )
    # An endpoint of a former release does not say it.
    cut = [(m["id"], m["unreachable"]) for m in document["members"] if m.get("unreachable")]
    notes = [Text(f"{server}: {unreachable_text(reasons)}", style="red") for server, reasons in cut]
    return Group(table, *notes) if notes else table


def unreachable_text(reasons: Mapping[str, str]) -> str:
    """What keeps clients from a server, for people.

    Args:
        reasons: By client id.
    """
    return "; ".join(f"unreachable for {client}: {why}" for client, why in reasons.items())


def status(
    endpoint: Endpoint = DEFAULT_ENDPOINT, key_file: KeyToShow = None, as_json: Json = False
) -> None:
    """Show the members of a cluster, and whether every expert has a live replica."""
    document = fetch_status(endpoint, key_file)
    if as_json:
        typer.echo(json.dumps(document))
        return
    from rich.console import Console

    # Piped, there is no width to fit into, and half an address is of no use to the next program.
    console = Console()
    Console(width=None if console.is_terminal else _PIPED_WIDTH).print(status_table(document))
    page = page_address(endpoint)
    if console.is_terminal and OPERATOR_PATH in page:
        typer.echo(f"page: {page}")


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to go on from.")],
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 64,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=2.0, help="0: the likeliest token each time. Default: the model's."
        ),
    ] = None,
    key_file: KeyToShow = None,
    as_json: Json = False,
) -> None:
    """Print a completion of a prompt, as it comes."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "stream": not as_json}
    if temperature is not None:
        body["temperature"] = temperature
    url = f"{_base(endpoint)}/v1/completions"
    timeout = httpx.Timeout(_STATUS_S, read=_TOKEN_S)
    headers = authorization(key_file)
    try:
        if as_json:
            response = httpx.post(url, json=body, headers=headers, timeout=timeout)
            _check(response)
            typer.echo(json.dumps(response.json()))
            return
        with httpx.stream("POST", url, json=body, headers=headers, timeout=timeout) as response:
            if response.is_error:
                response.read()
            _check(response)
            for line in response.iter_lines():
                _print_chunk(line)
        typer.echo()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ClusterError(_unreachable(endpoint, error)) from error


def _print_chunk(line: str) -> None:
    data = line.removeprefix("data: ")
    if not line.startswith("data: ") or data == "[DONE]":
        return
    chunk = json.loads(data)
    if "error" in chunk:
        raise ClusterError(f"the stream broke off: {_reason(chunk)}")
    for choice in chunk["choices"]:
        sys.stdout.write(choice.get("text") or "")
    sys.stdout.flush()


def _check(response: httpx.Response) -> None:
    if response.is_error:
        raise ClusterError(
            f"the endpoint refused ({response.status_code}): {_reason(response.json())}"
        )


def _reason(document: dict[str, Any]) -> str:
    error = document.get("error", document)
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _base(endpoint: str) -> str:
    return endpoint.rstrip("/").removesuffix("/v1")


def _unreachable(endpoint: str, error: Exception) -> str:
    # One line: httpx adds a second one to an HTTP error, with a link.
    why = str(error).partition("\n")[0] or type(error).__name__
    up = latest_up()
    running = (
        "no `eaas up` of yours runs" if up is None else f"your last `eaas up` is at {up.endpoint}"
    )
    return (
        f"{endpoint}: no cluster answers there ({why}); {running}: start one, "
        "or give --endpoint or EAAS_ENDPOINT"
    )
