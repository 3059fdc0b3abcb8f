"""`eaas down`: end the cluster of the last `eaas up`, on this machine or on Ray."""

from __future__ import annotations

import os
import signal
import time
from typing import Annotated, Literal

import typer

from eaas.errors import ClusterError
from eaas.net.server_records import started_at
from eaas_cli.commands.up_on_ray import down_on_ray
from eaas_cli.local.running_clusters import Up, latest_up

__all__ = ["register"]

_END_S = 60.0
_POLL_S = 0.1


def register(app: typer.Typer) -> None:
    """Add `down` to the `eaas` program."""
    app.command("down")(down)


def down(
    on: Annotated[
        Literal["local", "ray"] | None,
        typer.Option(
            "--on",
            help="This machine, or a Ray cluster (RAY_ADDRESS, or this machine's).",
            show_default="where your last `eaas up` runs",
        ),
    ] = None,
) -> None:
    """End the cluster of your last `eaas up`."""
    up = latest_up(on)
    if on == "ray" or (up is not None and up.on_ray):
        down_on_ray()
    elif up is None:
        raise ClusterError("no `eaas up` of yours runs on this machine")
    else:
        _end(up)


def _end(up: Up) -> None:
    os.kill(up.pid, signal.SIGTERM)
    deadline = time.monotonic() + _END_S
    while started_at(up.pid) == up.started:
        if time.monotonic() > deadline:
            raise ClusterError(f"`eaas up` (pid {up.pid}) has not ended after {_END_S:.0f} s")
        time.sleep(_POLL_S)
