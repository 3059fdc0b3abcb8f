"""Measure the data plane: an exchange without compute, against the same copies in C."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eaas.garbage_collection import collector_off
from eaas_cli.bench.command import command, end_on_sigterm, say, show
from eaas_cli.commands.options import Json
from eaas_cli.errors import exit_with_one_line


def main(
    transport: Annotated[
        list[str] | None,
        typer.Option(
            help="Transport to measure. Repeatable.", show_default="all that servers offer"
        ),
    ] = None,
    hidden: Annotated[str, typer.Option(metavar="H,...", help="Hidden sizes.")] = "2048,7168",
    tokens: Annotated[
        str, typer.Option(metavar="T,...", help="Batch sizes; each must fit a slot.")
    ] = "1,8,64,512",
    rounds: Annotated[
        int, typer.Option(min=1, help="Turns of each measurement; slow ones get 3.")
    ] = 5,
    server: Annotated[
        bool,
        typer.Option(
            "--server/--no-server",
            help="Also measure a server's processor time and a real layer.",
        ),
    ] = True,
    layer: Annotated[
        str, typer.Option(metavar="H,I,E,K", help="Experts of the real layer.")
    ] = "2048,768,128,8",
    layer_tokens: Annotated[
        str, typer.Option(metavar="T,...", help="Batch sizes of the real layer.")
    ] = "64",
    servers: Annotated[
        int, typer.Option(min=1, help="Servers of a layer call that is compared with one server's.")
    ] = 3,
    sleep_us: Annotated[
        int, typer.Option(min=1, help="Each of these servers sleeps so long instead of computing.")
    ] = 2000,
    device: Annotated[
        str,
        typer.Option(help="cuda: also make layer calls for tensors on a GPU."),
    ] = "cpu",
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Draw the rows.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the data plane: an exchange without compute, against the same copies in C."""
    with collector_off():
        from benchmarks.dispatch import make_plan
        from benchmarks.dispatch.plot import draw_plot
        from benchmarks.dispatch.report import print_report
        from benchmarks.dispatch.run import bench_dispatch
        from eaas_cli.bench.experts.plot import check_plot
        from expert_server.service import transports as known_transports

    end_on_sigterm()
    plan = make_plan(
        transports=transport or (),
        known_transports=known_transports(),
        hidden=hidden,
        tokens=tokens,
        rounds=rounds,
        with_server=server,
        device=device,
        layer=layer,
        layer_tokens=layer_tokens,
        servers=servers,
        sleep_us=sleep_us,
    )
    if plot is not None:
        check_plot(plot)
    document = bench_dispatch(plan, say=say)
    if plot is not None:
        draw_plot(document, plot)
    show(document, as_json, print_report)


app = command(main)

if __name__ == "__main__":
    exit_with_one_line(app)
