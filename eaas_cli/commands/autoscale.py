"""`eaas autoscale`: adjust the number of expert servers to the load."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eaas.errors import ClusterError
from eaas.log import print_line
from eaas_cli.commands.options import (
    DEFAULT_ENDPOINT,
    ConfigFile,
    Endpoint,
    KeyToShow,
    Tls,
    check_join,
)
from eaas_cli.commands.servers import monitor_addresses, operator
from eaas_cli.endpoint import fetch_status
from eaas_cli.local.running_clusters import name_cluster

if TYPE_CHECKING:
    from balancer.autoscaler.live import LiveAutoscaler

__all__ = ["autoscale"]


def autoscale(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    join: Annotated[
        str | None,
        typer.Option(
            "--join",
            metavar="HOST:PORT[,...]",
            callback=check_join,
            help="Address of the cluster's monitor, instead of --endpoint.",
            show_default=False,
        ),
    ] = None,
    least: Annotated[
        int | None,
        typer.Option("--min-servers", help="Minimum number of servers.", show_default="1"),
    ] = None,
    most: Annotated[
        int | None,
        typer.Option("--max-servers", help="Maximum number of servers.", show_default="8"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print each decision and its reason; change nothing.")
    ] = False,
    key_file: KeyToShow = None,
    tls: Tls = None,
    config: ConfigFile = None,
) -> None:
    """Start and stop expert servers, one at a time, as the load rises and falls.

    The cluster must run under `eaas up`, which starts the servers. Ctrl-C ends the autoscaler; servers stay.
    """
    from balancer.autoscaler.live import LiveAutoscaler
    from eaas.config import load_config
    from eaas.log import configure_logging
    from eaas.net.authorisation import OPERATOR
    from eaas.net.listen_policy import identity
    from eaas_cli.local.interrupt import Interrupt, Interrupted

    configure_logging("autoscaler")
    # httpx logs a line per request.
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
        name_cluster(endpoint)
    else:
        own = identity(cluster.security, OPERATOR)
    with Interrupt() as interrupt:
        autoscaler = LiveAutoscaler(loaded, join, dry_run, tls=own)
        try:
            # A failed first poll ends the command, because the address may be wrong. Later ones do not.
            print_line(autoscaler.look())
            while True:
                interrupt.wait(loaded.interval_s)
                print_line(_poll(autoscaler))
        except Interrupted:
            return
        finally:
            autoscaler.close()


def _poll(autoscaler: LiveAutoscaler) -> str:
    try:
        return autoscaler.look()
    except ClusterError as error:
        return f"{error}; trying again"
