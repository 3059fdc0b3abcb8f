"""Measure the unit costs of a large cluster, and simulate its failures: the figures of docs/scale.md."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from eaas.errors import ConfigError
from eaas_cli.bench.command import command, end_on_sigterm, say, show
from eaas_cli.commands.options import Json
from eaas_cli.console import print_table
from eaas_cli.errors import exit_with_one_line


def main(
    servers: Annotated[int, typer.Option(min=4, help="Expert servers.")] = 1000,
    nodes: Annotated[int, typer.Option(min=2, help="Nodes that they are dealt to.")] = 250,
    racks: Annotated[int, typer.Option(min=2, help="Racks that the nodes are dealt to.")] = 25,
    clients: Annotated[int, typer.Option(min=1, help="Attention clients.")] = 200,
    layers: Annotated[int, typer.Option(min=1, help="MoE layers of the model.")] = 58,
    experts: Annotated[int, typer.Option(min=2, help="Experts of a layer.")] = 256,
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size.")] = 7168,
    top_k: Annotated[int, typer.Option(min=1, help="Experts per token.")] = 8,
    as_json: Json = False,
) -> None:
    """Measure the unit costs of a large cluster and simulate its failures (minutes)."""
    from benchmarks.scale import bench_scale
    from simulator.failures import Sizes

    end_on_sigterm()
    if not racks <= nodes <= servers:
        raise ConfigError(
            f"--nodes {nodes}: give as many as --racks at least, and as --servers at most"
        )
    sizes = Sizes(servers, nodes, racks, clients=clients, layers=layers, experts=experts)
    show(bench_scale(sizes, hidden=hidden, top_k=top_k, say=say), as_json, _report)


def _report(document: dict[str, Any]) -> None:
    machine, monitor, balancer = (document[key] for key in ("machine", "monitor", "balancer"))
    print(f"{machine['processor']}, {machine['cores']} cores")
    reach, planner, placement = monitor["reach"], balancer["planner"], balancer["placement"]
    print_table(
        ("what", "cost"),
        [
            ("a heartbeat, monitor", f"{monitor['heartbeat_us']} us"),
            (f"{monitor['members']} members, monitor", f"{monitor['cores']} cores"),
            ("a member, monitor", f"{monitor['kb_per_member']} kB"),
            (f"a snapshot of {monitor['members']}", f"{monitor['snapshot']['bytes']} bytes"),
            ("longest step of the monitor's loop", f"{monitor['snapshot']['hold_cpu_ms']} ms"),
            ("a client's report of its connections", f"{reach['bytes']} bytes"),
            ("that report, for each watcher", f"{reach['push_us']} us"),
            ("the first placement, planner", f"{planner['first_s']} s"),
            ("the loss of a node, planner", f"{planner['loss_s']} s"),
            ("of that at once", f"{planner['longest_s']} s"),
            ("a placement", f"{placement['bytes']} bytes"),
            ("a placement, client", f"{placement['take_ms']} ms"),
            *(
                (
                    f"a connection, {end}",
                    f"{c['kb']} kB, {c['threads']} threads, {c['files']} files",
                )
                for end, c in document["connections"].items()
                if end != "slots"
            ),
            *(
                (f"a slot of {s['tokens']} tokens", f"{s['bytes'] / 1e6:.2f} MB")
                for s in document["connections"]["slots"]
            ),
            *(
                (f"plan, {p['policy']}", f"{p['plan_ms']:.0f} ms, with nodes {p['nodes_ms']:.0f}")
                for p in balancer["policies"]
            ),
        ],
    )
    print_table(
        (
            "lost",
            "servers",
            "uncovered",
            "until s",
            "one replica",
            "until s",
            "PAR",
            "loads",
            "s/step",
        ),
        [
            (
                row["what"],
                str(row["servers"]),
                f"{100 * row['uncovered']:.2f} %",
                _seconds(row["covered_s"]),
                f"{100 * row['single']:.2f} %",
                _seconds(row["whole_s"]),
                f"{row['imbalance_before']:.2f} -> {row['imbalance']:.2f}",
                str(row["loads"]),
                str(row.get("step_s", "")),
            )
            for row in (*document["failures"], *document["upgrade"])
        ],
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


app = command(main)

if __name__ == "__main__":
    exit_with_one_line(app)
