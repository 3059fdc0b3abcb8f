"""The `eaas` program. Each command imports its modules when it runs, so that `--help` needs no torch."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys

import typer

from eaas import __version__
from eaas.cores import limit_thread_pools
from eaas_cli.commands import (
    autoscale,
    bench,
    certs,
    chaos,
    client,
    demo,
    down,
    moved,
    placement,
    roles,
    servers,
    simulate,
    top,
    trace,
    up,
    vllm,
)
from eaas_cli.errors import exit_with_one_line

__all__ = ["app", "main"]

app = typer.Typer(
    name="eaas",
    help="Expert-as-a-Service: serve Mixture-of-Experts models with the experts on separate servers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # The commands inherit it.
    context_settings={"help_option_names": ["--help", "-h"]},
)
up.register(app)
down.register(app)
client.register(app)
top.register(app)
servers.register(app)
autoscale.register(app)
placement.register(app)
certs.register(app)
roles.register(app)
vllm.register(app)
demo.register(app)
bench.register(app)
chaos.register(app)
simulate.register(app)
trace.register(app)
moved.register(app, bench.bench, simulate.simulate)


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
    """Run the program. A user's mistake prints one line on standard error and exits with code 2."""
    limit_thread_pools()
    atexit.register(_skip_last_collection)
    exit_with_one_line(app)


def _skip_last_collection() -> None:
    """Skip the last garbage collection, which would take more than a second with torch imported."""
    gc.freeze()
    if "triton" in sys.modules:
        # torch imports it where it is installed. Its bindings would print all of their objects as leaks.
        # Standard error may be closed, or its disk full. The rest of the output is lost.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
