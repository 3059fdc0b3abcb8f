"""Measure the data plane: layer calls without compute, against the same copies in C."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from benchmarks.dispatch.plan import SLOTS, Plan
from eaas import transports
from eaas.cores import usable_cores
from eaas.errors import ConfigError
from eaas.garbage_collection import collector_off
from eaas.wire.arena import SPIN_US
from eaas_cli.bench.command import DEVICES, command, end_on_sigterm, find_gpu, say, show
from eaas_cli.bench.experts.plan import parse_shape
from eaas_cli.bench.machine import BusyElsewhere, describe_machine
from eaas_cli.bench.serve import with_fork_server
from eaas_cli.commands.options import Json
from eaas_cli.console import print_figures, print_rows
from eaas_cli.errors import exit_with_one_line
from eaas_cli.local.fork_server import ForkServer
from eaas_cli.option_values import known, numbers, once

# Modules that the fork server imports for the servers.
_MODULES = ("benchmarks.harness.lone_server",)


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
    device: Annotated[
        str, typer.Option(help="cuda: also make layer calls for tensors on a GPU.")
    ] = "cpu",
    as_json: Json = False,
) -> None:
    """Measure the data plane: layer calls without compute, against the same copies in C."""
    end_on_sigterm()
    usable = tuple(transports.usable())
    plan = Plan(
        transports=known("--transport", transport or usable, usable),
        hidden=once(numbers("--hidden", hidden)),
        tokens=tuple(sorted(set(numbers("--tokens", tokens)))),
        rounds=rounds,
        layer=parse_shape(layer),
        layer_tokens=tuple(sorted(set(numbers("--layer-tokens", layer_tokens)))),
    )
    known("--device", [device], DEVICES)
    document = bench_dispatch(plan, say, with_server=server, on_gpu=device == "cuda")
    show(document, as_json, _report)


def bench_dispatch(
    plan: Plan,
    say: Callable[[str], None],
    *,
    with_server: bool,
    on_gpu: bool = False,
    fork_server: ForkServer | None = None,
) -> dict[str, Any]:
    """Measure the data plane and the machine's floor, in turn. Sets torch's threads to 1.

    Args:
        with_server: Measure the parts after the rows.
        on_gpu: Also make layer calls for tensors on the GPU.
        fork_server: Forks the processes, and keeps running afterwards. None: the run starts its own.

    Returns:
        The document of `python -m benchmarks.dispatch --json` (see the package docstring).

    Raises:
        ConfigError: The machine has a single core, or no GPU.
        EaasError: A process did not start or did not answer; there is not enough memory for the slots.
    """
    if usable_cores() < 2:
        raise ConfigError(
            "bench dispatch: the floor needs two cores, one for each side, and this process may use one"
        )
    at = find_gpu() if on_gpu else None
    with collector_off():
        import torch

        from benchmarks.dispatch.parts import (
            bench_layer,
            bench_server,
            lack_of_memory,
        )
        from benchmarks.dispatch.rows import bench_rows

    torch.set_num_threads(1)
    elsewhere = BusyElsewhere()
    skipped: list[dict[str, str]] = []
    say("importing what servers need")
    with with_fork_server(_MODULES, fork_server) as forks:
        document: dict[str, Any] = {
            "settings": _settings(plan),
            "rows": bench_rows(plan, say, skipped, forks, at),
        }
        if with_server:
            say("a server that is idle, then busy")
            document["server"] = bench_server(plan, forks)
            lack = lack_of_memory(plan.layer)
            if lack:
                skipped.append({"what": f"layer {plan.layer}", "reason": lack})
            else:
                say(f"a real layer: {plan.layer}, T={plan.layer_tokens} (first its random weights)")
                document["layer"] = bench_layer(plan, usable_cores(), forks)
    machine = describe_machine() | {
        "torch": torch.__version__,
        "busy_cores_elsewhere": elsewhere.cores(),
        **({} if at is None else {"device": torch.cuda.get_device_name(at)}),
    }
    return {"machine": machine} | document | {"skipped": skipped}


def _settings(plan: Plan) -> dict[str, Any]:
    return {
        "dtype": "bfloat16",
        "top_k": plan.top_k,
        "experts": plan.num_experts,
        "slot_tokens": max(plan.tokens),
        "spin_us": SPIN_US,
        "client_slots": SLOTS,
        "rounds": plan.rounds,
        "turn_s": plan.turn_s,
    }


def _report(document: dict[str, Any]) -> None:
    print_figures(document["machine"])
    columns = ("tokens", "floor_us", "layer_call_us", "over_floor_us", "times_floor")
    rows = document["rows"]
    for transport, hidden in dict.fromkeys((row["transport"], row["hidden"]) for row in rows):
        here = [row for row in rows if (row["transport"], row["hidden"]) == (transport, hidden)]
        print_rows(here, (*columns, "device_call_us"), title=f"{transport}, hidden {hidden}")
    print_figures(document.get("server", {}))
    for rows in (document.get("layer"), document["skipped"]):
        if rows:
            print_rows(rows)


app = command(main)

if __name__ == "__main__":
    exit_with_one_line(app)
