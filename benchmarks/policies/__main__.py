"""Measure placement policies: planning time on one core, and quality of the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eaas.errors import ConfigError
from eaas_cli.bench.command import command, end_on_sigterm, say, show
from eaas_cli.commands.options import Json
from eaas_cli.errors import exit_with_one_line


def main(
    size: Annotated[
        list[str] | None,
        typer.Option(
            metavar="L,E,S,P",
            help="Layers, experts, servers, replicas per layer. Repeatable.",
            show_default="58,256,64,320; 58,256,288,576; 60,512,1000,2000",
        ),
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="Policy to measure. Repeatable.", show_default="all")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Plans per policy and size.")] = 9,
    nodes: Annotated[
        int,
        typer.Option(
            min=2,
            help="Plan also with the servers dealt to this many nodes, and compare the times.",
        ),
    ] = 8,
    trace: Annotated[
        list[Path] | None,
        typer.Option(
            help="Routing trace to replay, instead of measuring planning time. Repeatable."
        ),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATH",
            help="With --trace: checkout of vllm, sglang or vllm-ascend, whose balancers run, too. "
            "Its code is run. Repeatable.",
        ),
    ] = None,
    servers: Annotated[int, typer.Option(min=1, help="With --trace: number of servers.")] = 64,
    interval: Annotated[
        int, typer.Option(min=1, help="With --trace: iterations between plans.")
    ] = 1024,
    as_json: Json = False,
) -> None:
    """Measure placement policies: planning time on one core, and quality of the plan; or replay traces."""
    from benchmarks.policies import SIZES, bench_policies, parse_size
    from benchmarks.policies.peer_run import compare_peers, print_peers, read_traces
    from benchmarks.policies.report import print_report

    end_on_sigterm()
    if peer and not trace:
        raise ConfigError("--peer: give a --trace to replay")
    if trace:
        traces = read_traces(trace)
        document = compare_peers(
            peer or (),
            traces,
            policies=policy or (),
            servers=servers,
            interval=interval,
            say=say,
        )
        show(document, as_json, print_peers)
        return
    sizes = [parse_size(text) for text in size] if size else SIZES
    show(
        bench_policies(sizes, policy or (), rounds=rounds, nodes=nodes, say=say),
        as_json,
        print_report,
    )


app = command(main)

if __name__ == "__main__":
    exit_with_one_line(app)
