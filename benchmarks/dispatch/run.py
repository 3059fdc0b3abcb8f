"""The run of `python -m benchmarks.dispatch` and its document."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.dispatch.caller import Caller
from benchmarks.dispatch.cell import bench_cell
from benchmarks.dispatch.floor import Floor
from benchmarks.dispatch.layer import bench_layer, lack_of_memory
from benchmarks.dispatch.plan import Plan
from benchmarks.dispatch.server import null_server
from benchmarks.dispatch.servers import bench_servers
from benchmarks.dispatch.sizes import request_bytes, result_bytes
from benchmarks.dispatch.upkeep import bench_upkeep
from eaas.cores import usable_cores
from eaas.errors import ConfigError
from eaas.wire.arena import SPIN_US
from eaas_cli.bench.device import find_gpu
from eaas_cli.bench.machine import BusyElsewhere, describe_machine
from eaas_cli.bench.worker import with_fork_server, working
from eaas_cli.local.fork_server import ForkServer

__all__ = ["bench_dispatch"]

# Slots of a client, one for each of two micro-batches. At T=512 and H=7168 a slot has 30 MB.
_SLOTS = 2
# Modules that the fork server imports for the servers.
_MODULES = ("benchmarks.dispatch.server_process",)


def bench_dispatch(
    plan: Plan, say: Callable[[str], None], fork_server: ForkServer | None = None
) -> dict[str, Any]:
    """Measure the data plane and the machine's floor, in turn. Sets torch's threads to 1.

    Args:
        fork_server: Forks the processes, and keeps running afterwards. None: the run starts its own.

    Returns:
        The document of `python -m benchmarks.dispatch --json` (see the package docstring).

    Raises:
        ConfigError: The machine has a single core, or no such device.
        EaasError: A process did not start or did not answer; there is not enough memory for the slots.
    """
    if usable_cores() < 2:
        raise ConfigError(
            "bench dispatch: the floor needs two cores, one for each side, and this process may use one"
        )
    device = find_gpu() if plan.device == "cuda" else None
    torch.set_num_threads(1)
    elsewhere = BusyElsewhere()
    skipped: list[dict[str, str]] = []
    say("importing what servers need")
    with with_fork_server(_MODULES, fork_server) as forks:
        document: dict[str, Any] = {
            "settings": _settings(plan),
            "rows": _rows(plan, say, skipped, forks, device),
        }
        if plan.with_server:
            document |= _server(plan, say, skipped, forks)
    machine = describe_machine() | {
        "torch": torch.__version__,
        "busy_cores_elsewhere": elsewhere.cores(),
        **({} if device is None else {"device": torch.cuda.get_device_name(device)}),
    }
    return {"machine": machine} | document | {"skipped": skipped}


def _server(
    plan: Plan, say: Callable[[str], None], skipped: list[dict[str, str]], fork_server: ForkServer
) -> dict[str, Any]:
    """Measure a server's processor time and a real layer; return those parts of the document."""
    say("a server that is idle, then busy")
    parts: dict[str, Any] = {"server": bench_upkeep(plan, _SLOTS, fork_server)}
    say(f"{plan.servers} servers that sleep instead of computing, and one")
    parts["servers"] = bench_servers(plan, _SLOTS, fork_server)
    lack = lack_of_memory(plan.layer)
    if lack:
        skipped.append({"what": f"layer {plan.layer}", "reason": lack})
    else:
        say(f"a real layer: {plan.layer}, T={plan.layer_tokens} (first its random weights)")
        parts["layer"] = bench_layer(plan, _SLOTS, usable_cores(), fork_server)
    return parts


def _rows(
    plan: Plan,
    say: Callable[[str], None],
    skipped: list[dict[str, str]],
    fork_server: ForkServer,
    device: torch.device | None = None,
) -> list[dict[str, Any]]:
    most = max(plan.hidden), max(plan.tokens)
    cores = sorted(os.sched_getaffinity(0))[:2]
    rows = []
    say("the floor's other process")
    with Floor(request_bytes(plan, *most), result_bytes(*most), (cores[0], cores[1])) as floor:
        for hidden in plan.hidden:
            say(f"hidden {hidden}: starting a server that computes nothing")
            with working([null_server(plan, hidden, most[1], _SLOTS)], fork_server) as (server,):
                assert server.address is not None
                for transport in plan.transports:
                    with Caller(
                        server.address,
                        transport,
                        hidden=hidden,
                        num_experts=plan.num_experts,
                        top_k=plan.top_k,
                        name="client",
                        slots=_SLOTS,
                    ) as caller:
                        capacity = caller.capacity(plan.top_k)
                        for tokens in plan.tokens:
                            what = f"{transport} hidden {hidden} T={tokens}"
                            if tokens > capacity:
                                reason = f"a slot takes {capacity} tokens over this transport"
                                skipped.append({"what": what, "reason": reason})
                                continue
                            say(f"{what}: {plan.rounds} rounds")
                            rows.append(
                                bench_cell(plan, transport, hidden, tokens, caller, floor, device)
                            )
    return rows


def _settings(plan: Plan) -> dict[str, Any]:
    return {
        "dtype": "bfloat16",
        "top_k": plan.top_k,
        "experts": plan.num_experts,
        "slot_tokens": max(plan.tokens),
        "server_spin_us": SPIN_US,
        "client_spin_us": SPIN_US,
        "client_slots": _SLOTS,
        "rounds": plan.rounds,
        "turn_s": plan.turn_s,
    }
