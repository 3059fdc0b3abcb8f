"""`eaas certs`: an authority and certificates for trying."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eaas.words import counted

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("certs")(certs)


def certs(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where to write them.", show_default=False)
    ],
    days: Annotated[int, typer.Option(min=1, max=3650, help="How long they hold.")] = 30,
    san: Annotated[
        list[str] | None,
        typer.Option(
            help="One more host name or address in servers' certificates; may be given several times.",
            show_default="this machine's",
        ),
    ] = None,
    renew: Annotated[
        bool,
        typer.Option(
            "--renew",
            help="New certificates by the authority that is in DIR, for a running cluster.",
        ),
    ] = False,
) -> None:
    """Write a local authority, and a certificate and a key for each role: what --tls DIR asks for.

    DIR/ca.key is for this command alone: no process of a cluster needs it.
    """
    from eaas.certs import ROLES, issue_again, write_certificates

    write = issue_again if renew else write_certificates
    write(directory, days=days, names=san or ())
    typer.echo(
        f"wrote certificates for {', '.join(ROLES)} to {directory}; they hold {counted(days, 'day')}"
    )
