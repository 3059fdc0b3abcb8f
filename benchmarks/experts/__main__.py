"""Measure how fast a live expert server reads its experts, against the machine's read speed."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from eaas.garbage_collection import collector_off
from eaas_cli.bench.command import command, end_on_sigterm, say, show
from eaas_cli.commands.options import Json
from eaas_cli.console import print_table
from eaas_cli.errors import exit_with_one_line

_SHAPES = ["256,64,32,4", "1024,512,64,8", "2048,768,128,8"]


def main(
    shape: Annotated[
        list[str], typer.Option(metavar="H,I,E,K", help="Experts of a layer. Repeatable.")
    ] = _SHAPES,
    tokens: Annotated[str, typer.Option(metavar="T,...", help="Batch sizes.")] = "1,2,4,8",
    threads: Annotated[
        int, typer.Option(min=0, help="The server's threads; 0 takes all cores.")
    ] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds per batch size.")] = 7,
    pause_us: Annotated[
        int, typer.Option(min=0, help="The client computes so long between two requests.")
    ] = 200,
    as_json: Json = False,
) -> None:
    """Measure how fast a live expert server reads its experts, against the machine's read speed."""
    with collector_off():
        from benchmarks.experts.run import bench_experts_live
        from eaas.cores import usable_cores
        from eaas_cli.bench.experts.plan import parse_shape
        from eaas_cli.option_values import numbers

    end_on_sigterm()
    document = bench_experts_live(
        [parse_shape(text) for text in shape],
        numbers("--tokens", tokens),
        threads=threads or usable_cores(),
        rounds=rounds,
        pause_us=pause_us,
        say=say,
    )
    show(document, as_json, _report)


def _report(document: dict[str, Any]) -> None:
    machine = document["machine"]
    print(f"{machine['processor']}, {document['threads']} threads of {machine['cores']} cores")
    print_table(
        ("H,I,E,K", "T", "read GB/s", "us", "live", "from", "to", "round trip"),
        [
            (
                row["shape"],
                str(row["tokens"]),
                f"{row['read_gb_per_s']:.3g}",
                f"{row['service_us']:.4g}",
                *(f"{row[name]:.2f}" for name in ("live", "least", "most", "round_trip")),
            )
            for row in document["rows"]
        ],
    )
    if machine["busy_cores_elsewhere"] > 0.1:
        print(f"Other processes kept {machine['busy_cores_elsewhere']} cores busy")


app = command(main)

if __name__ == "__main__":
    exit_with_one_line(app)
