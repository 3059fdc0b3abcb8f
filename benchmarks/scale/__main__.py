"""Measure the unit costs of a large cluster, and simulate its failures: the figures of docs/scale.md."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from eaas.errors import ConfigError
from eaas_cli.bench.command import command, end_on_sigterm, say, show
from eaas_cli.commands.options import Json
from eaas_cli.console import print_figures, print_rows
from eaas_cli.errors import exit_with_one_line

_PARTS = ("monitor", "balancer", "failures")
# Layers of the simulated failures and upgrades: they are alike.
_FAILURE_LAYERS, _UPGRADE_LAYERS = 8, 2


def main(
    servers: Annotated[int, typer.Option(min=4, help="Expert servers.")] = 1000,
    nodes: Annotated[int, typer.Option(min=2, help="Nodes that they are dealt to.")] = 250,
    racks: Annotated[int, typer.Option(min=2, help="Racks that the nodes are dealt to.")] = 25,
    clients: Annotated[int, typer.Option(min=1, help="Attention clients.")] = 200,
    layers: Annotated[int, typer.Option(min=1, help="MoE layers of the model.")] = 58,
    experts: Annotated[int, typer.Option(min=2, help="Experts of a layer.")] = 256,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PART", help=f"Repeatable: {', '.join(_PARTS)}.", show_default="all parts"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the unit costs of a large cluster and simulate its failures (minutes)."""
    from benchmarks.scale.cluster import Sizes
    from benchmarks.scale.costs import bench_balancer
    from benchmarks.scale.failures import simulate_failures, simulate_upgrade
    from benchmarks.scale.monitor import bench_monitor
    from eaas_cli.bench.machine import describe_machine
    from eaas_cli.option_values import known

    end_on_sigterm()
    parts = known("--only", only or _PARTS, _PARTS)
    if not racks <= nodes <= servers:
        raise ConfigError(
            f"--nodes {nodes}: give as many as --racks at least, and as --servers at most"
        )
    sizes = Sizes(servers, nodes, racks, clients=clients, layers=layers, experts=experts)
    fewer = replace(sizes, layers=min(_FAILURE_LAYERS, layers))
    document: dict[str, Any] = {
        "machine": describe_machine(),
        "settings": asdict(sizes) | {"simulated": fewer.layers},
    }
    if "monitor" in parts:
        say(f"a monitor of {servers + clients} members")
        document["monitor"] = bench_monitor(servers + clients, servers)
    if "balancer" in parts:
        document["balancer"] = bench_balancer(sizes, say)
    if "failures" in parts:
        document["failures"] = simulate_failures(fewer, say)
        fewest = replace(fewer, layers=min(_UPGRADE_LAYERS, layers))
        document["upgrade"] = simulate_upgrade(fewest, say)
    show(document, as_json, _report)


def _report(document: dict[str, Any]) -> None:
    parts = ("machine", "monitor", "balancer")
    print_figures({part: document[part] for part in parts if part in document})
    for rows in (
        document.get("balancer", {}).get("policies"),
        document.get("failures"),
        document.get("upgrade"),
    ):
        if rows:
            print_rows(rows)


app = command(main)

if __name__ == "__main__":
    exit_with_one_line(app)
