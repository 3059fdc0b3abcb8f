"""`eaas certs`: write a local certificate authority and certificates, to try TLS."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eaas.counted import counted

__all__ = ["certs"]


def certs(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory to write to.", show_default=False)
    ],
    days: Annotated[
        int, typer.Option(min=1, max=3650, help="Days that the certificates are valid.")
    ] = 30,
    san: Annotated[
        list[str] | None,
        typer.Option(
            help="Another host name or address for the servers' certificates. Repeatable.",
            show_default="this machine's",
        ),
    ] = None,
    renew: Annotated[
        bool,
        typer.Option(
            "--renew",
            help="Reissue certificates from the authority in DIR; a running cluster picks them up.",
        ),
    ] = False,
) -> None:
    """Write a local authority, and a certificate and a key for each role, for --tls DIR.

    Only this command reads DIR/ca.key: no process of a cluster needs it.
    """
    from eaas_cli.certificates import ROLES, issue_again, write_certificates

    write = issue_again if renew else write_certificates
    write(directory, days=days, names=san or ())
    typer.echo(
        f"wrote certificates for {', '.join(ROLES)} to {directory}, valid for {counted(days, 'day')}"
    )
