"""Measure the cost of members for the monitor, and the time until all watchers see a death (minutes)."""

from __future__ import annotations

from typing import Annotated

import typer

from eaas_cli.bench.command import command, end_on_sigterm, say, show
from eaas_cli.commands.options import Json
from eaas_cli.errors import exit_with_one_line


def main(
    members: Annotated[
        str, typer.Option(metavar="N,...", help="Numbers of simulated members.")
    ] = "100,1000,10000",
    watchers: Annotated[
        str, typer.Option(metavar="N,...", help="Numbers of watchers; all members come last.")
    ] = "10,100,1000",
    snapshot_watchers: Annotated[
        int,
        typer.Option(min=1, help="Watchers that fetch snapshots together, again and again."),
    ] = 100,
    per_connection: Annotated[
        int, typer.Option(min=1, help="Members that share a connection.")
    ] = 1,
    loaders: Annotated[int, typer.Option(min=1, help="Processes that simulate members.")] = 2,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of each measurement.")] = 10.0,
    as_json: Json = False,
) -> None:
    """Measure the cost of members for the monitor, and the time until all watchers see a death (minutes)."""
    from benchmarks.monitor import make_plan
    from benchmarks.monitor.report import print_report
    from benchmarks.monitor.run import bench_monitor

    end_on_sigterm()
    plan = make_plan(
        members=members,
        watchers=watchers,
        per_connection=per_connection,
        loaders=loaders,
        seconds=seconds,
        snapshot_watchers=snapshot_watchers,
    )
    show(bench_monitor(plan, say=say), as_json, print_report)


app = command(main)

if __name__ == "__main__":
    exit_with_one_line(app)
