"""`eaas autoscale`: as many expert servers as the load of a running cluster takes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eaas.cli.client import fetch_status
from eaas.cli.options import DEFAULT_ENDPOINT, ConfigFile, Endpoint, KeyToShow, Tls
from eaas.cli.servers import monitor_addresses, operator
from eaas.errors import ClusterError

if TYPE_CHECKING:
    from balancer.autoscaler.live import LiveAutoscaler

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("autoscale")(autoscale)


def autoscale(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    join: Annotated[
        str | None,
        typer.Option(
            "--join",
            metavar="HOST:PORT[,...]",
            help="The cluster's monitor, in place of --endpoint.",
            show_default=False,
        ),
    ] = None,
    least: Annotated[
        int | None, typer.Option("--min-servers", help="Fewest servers.", show_default="1")
    ] = None,
    most: Annotated[
        int | None, typer.Option("--max-servers", help="Most servers.", show_default="8")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done and why; do nothing.")
    ] = False,
    key_file: KeyToShow = None,
    tls: Tls = None,
    config: ConfigFile = None,
) -> None:
    """Start and end expert servers of a cluster, one at a time, as its load rises and falls.

    Like `eaas scale`, it needs somebody who starts servers: `eaas up` does. Ctrl-C ends it; the servers
    that there are then stay.
    """
    from balancer.autoscaler.live import LiveAutoscaler
    from eaas.authority import OPERATOR
    from eaas.config import load_config
    from eaas.exposure import identity
    from eaas.local.interrupt import Interrupt, Interrupted
    from eaas.log import configure_logging

    configure_logging("autoscaler")
    # A line for each request would hide the others.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    limits: dict[str, Any] = {"min_servers": least, "max_servers": most}
    security = {"tls_dir": tls and str(tls)}
    cluster = load_config(config, security=security, autoscaler=limits)
    loaded = cluster.autoscaler
    if join is None:
        document = fetch_status(endpoint, key_file)
        join = ",".join(monitor_addresses(endpoint, document))
        directory = cluster.security.tls_dir
        own = operator(endpoint, document, Path(directory) if directory else None)
    else:
        own = identity(cluster.security, OPERATOR)
    with Interrupt() as interrupt:
        autoscaler = LiveAutoscaler(loaded, join, dry_run, tls=own)
        try:
            # The first look is the one that may fail: a wrong address is to be said at once.
            _say(autoscaler.look())
            while True:
                interrupt.wait(loaded.interval_s)
                _say(_look(autoscaler))
        except Interrupted:
            return
        finally:
            autoscaler.close()


def _look(autoscaler: LiveAutoscaler) -> str:
    try:
        return autoscaler.look()
    except ClusterError as error:
        return f"{error}; trying on"


def _say(line: str) -> None:
    print(line, flush=True)
