"""Compare predictors and transfer times of spare slots on a routing trace, in simulated time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from eaas_cli.bench.command import command, end_on_sigterm, say, show
from eaas_cli.commands.options import Json
from eaas_cli.console import print_table
from eaas_cli.errors import exit_with_one_line


def main(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="A trace, as for `eaas trace compare`.")
    ],
    servers: Annotated[int, typer.Option(min=1, help="Servers.")] = 64,
    iterations: Annotated[
        int | None, typer.Option(min=2, help="Only the first iterations.", show_default="all")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare predictors and transfer times of spare slots on a routing trace, in simulated time."""
    end_on_sigterm()
    from benchmarks.spares.run import bench_spares
    from simulator.traces import Trace, read_trace

    counts_ILE = read_trace(trace).counts_ILE[:iterations]
    show(bench_spares(Trace(counts_ILE), servers, say=say), as_json, _report)


def _report(document: dict[str, Any]) -> None:
    columns = ("mean PAR", "p99", "loads per layer and iteration")
    for kind, title in (("predictors", "predictor"), ("transfers", "transfer, layers")):
        rows = [
            (
                f"{row['name']:g}" if kind == "transfers" else row["name"],
                *(f"{row[key]:.3f}" for key in ("par", "p99", "loads")),
            )
            for row in document[kind]
        ]
        print_table((title, *columns), rows)
    print(
        f"{document['servers']} servers: {document['none']:.3f} without spare slots, "
        f"{document['best']:.3f} if chosen anew for each batch, knowing it; "
        f"a choice takes {document['plan_us']:.0f} us"
    )
    print(
        "predictors: transfers take no time; transfers: the last 8, times of a layer for an expert"
    )


app = command(main)

if __name__ == "__main__":
    exit_with_one_line(app)
