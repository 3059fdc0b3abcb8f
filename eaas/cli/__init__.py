"""The `eaas` program. Each command imports what it needs when it runs: `--help` needs no torch."""

from __future__ import annotations

import atexit
import gc
import sys

import typer

from eaas import __version__
from eaas.cli import (
    autoscale,
    bench,
    certs,
    chaos,
    client,
    demo,
    knobs,
    placement,
    roles,
    servers,
    simulate,
    top,
    trace,
    up,
)
from eaas.errors import EaasError
from eaas.local.child import announce
from eaas.log import print_line
from eaas.open_files import shortage_of_files

__all__ = ["app", "main"]

app = typer.Typer(
    name="eaas",
    help="Expert-as-a-Service: serve Mixture-of-Experts models, their experts on servers of their own.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
up.register(app)
client.register(app)
servers.register(app)
placement.register(app)
autoscale.register(app)
certs.register(app)
demo.register(app)
bench.register(app)
chaos.register(app)
simulate.register(app)
top.register(app)
trace.register(app)
knobs.register(app)
roles.register(app)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    pass


def main() -> None:
    """Run the program. A mistake of the user's is one line on standard error and exit code 2."""
    # What is there at the end goes with the process: to look for garbage in torch takes more than a second.
    atexit.register(gc.freeze)
    try:
        app()
    except Exception as error:
        # Whatever could not be opened, the limit is what to change.
        told = shortage_of_files(error)
        if told is None:
            if not isinstance(error, EaasError):
                raise
            told = str(error)
        announce(error=told)
        print_line(f"eaas: error: {told}", sys.stderr)
        sys.exit(2)
