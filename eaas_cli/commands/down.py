"""`eaas down`: end a cluster of `eaas up`, on this machine or on Ray."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Annotated, Literal

import typer

from eaas.config.environment import ENDPOINT_VARIABLE
from eaas.errors import ClusterError, ConfigError
from eaas.net.server_records import started_at
from eaas_cli.commands.options import as_url
from eaas_cli.commands.up_on_ray import down_on_ray
from eaas_cli.local.running_clusters import Up, chosen, name_cluster, up_at

__all__ = ["down"]

_END_S = 60.0
_POLL_S = 0.1


def down(
    on: Annotated[
        Literal["local", "ray"] | None,
        typer.Option(
            "--on",
            help="This machine, or a Ray cluster (RAY_ADDRESS, or this machine's).",
            show_default="where your cluster runs",
        ),
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(
            "--endpoint",
            metavar="URL",
            help="HTTP endpoint of the cluster.",
            show_default="your only cluster",
            envvar=ENDPOINT_VARIABLE,
        ),
    ] = None,
) -> None:
    """End a cluster that you started with `eaas up`."""
    up = chosen(on) if endpoint is None else up_at(as_url(endpoint))
    if up is not None:
        if on is not None and up.on_ray != (on == "ray"):
            raise ConfigError(f"{up} runs elsewhere: leave out --on {on}")
        name_cluster(up.endpoint)
    elif on != "ray":
        where = "on this machine" if endpoint is None else f"at {endpoint}"
        raise ClusterError(f"no `eaas up` of yours serves {where}")
    if up is None or up.on_ray:
        down_on_ray()
    else:
        _end(up)
    typer.echo("ended")


def _end(up: Up) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.kill(up.pid, signal.SIGTERM)
    deadline = time.monotonic() + _END_S
    while started_at(up.pid) == up.started:
        if time.monotonic() > deadline:
            raise ClusterError(f"`eaas up` (pid {up.pid}) has not ended after {_END_S:.0f} s")
        time.sleep(_POLL_S)
