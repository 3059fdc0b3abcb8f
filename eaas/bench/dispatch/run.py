"""`eaas bench dispatch`: the whole run, and its document."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from typing import Any

import torch

from eaas.bench.dispatch.caller import Caller
from eaas.bench.dispatch.cell import bench_cell
from eaas.bench.dispatch.crowd import bench_crowd
from eaas.bench.dispatch.floor import Floor
from eaas.bench.dispatch.layer import bench_layer, lack_of_memory
from eaas.bench.dispatch.plan import Plan
from eaas.bench.dispatch.policies import bench_policies
from eaas.bench.dispatch.scan import bench_scan
from eaas.bench.dispatch.server import null_server
from eaas.bench.dispatch.sizes import request_bytes, result_bytes
from eaas.bench.dispatch.upkeep import bench_upkeep
from eaas.bench.machine import busy_core_seconds, processor
from eaas.bench.worker import working
from eaas.config import load_config
from eaas.cores import usable_cores
from eaas.errors import ConfigError

__all__ = ["bench_dispatch"]

# As few as a client asks for (one for each of two micro-batches): at T=512 and H=7168 a slot has 30 MB.
_SLOTS = 2
_SCANNED = (64, 1024)


def bench_dispatch(plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure the data plane and the machine's floor, in turn. Processes and memory are gone afterwards.

    Sets torch's threads to 1, since the client only copies.

    Args:
        plan: What to measure.
        say: Progress, for people.

    Returns:
        The document of `eaas bench dispatch --json` (drawn in this package's docstring).

    Raises:
        ConfigError: The machine has a single core.
        EaasError: A process did not start or did not answer; there is no memory for the slots.
    """
    if usable_cores() < 2:
        raise ConfigError(
            "bench dispatch: the floor needs two cores, one for each side, and this process may use one"
        )
    torch.set_num_threads(1)
    began = _Usage()
    skipped: list[dict[str, str]] = []
    document: dict[str, Any] = {
        "settings": _settings(plan),
        "rows": _rows(plan, say, skipped),
    }
    if plan.with_server:
        say("a look at many flags")
        looks = {str(slots): bench_scan(slots, plan.rounds) for slots in _SCANNED}
        document["scan_us"] = {slots: scan for slots, (scan, _) in looks.items()}
        document["wait_look_us"] = {slots: look for slots, (_, look) in looks.items()}
        say("a server that is idle, then busy")
        document["server"] = bench_upkeep(plan, _SLOTS)
        say(f"{plan.clients} clients and {plan.servers} servers")
        document["crowd"] = bench_crowd(plan, _SLOTS)
        say("dispatch policies, one server at half speed")
        document["policies"] = bench_policies(plan, _SLOTS)
        lack = lack_of_memory(plan.layer)
        if lack:
            skipped.append({"what": f"layer {plan.layer}", "reason": lack})
        else:
            say(f"a real layer: {plan.layer}, T={plan.layer_tokens} (first its random weights)")
            document["layer"] = bench_layer(plan, _SLOTS, usable_cores())
    machine = {
        "processor": processor(),
        "cores": usable_cores(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "busy_cores_elsewhere": began.busy_elsewhere(),
    }
    return {"machine": machine} | document | {"skipped": skipped}


def _rows(
    plan: Plan, say: Callable[[str], None], skipped: list[dict[str, str]]
) -> list[dict[str, Any]]:
    most = max(plan.hidden), max(plan.tokens)
    cores = sorted(os.sched_getaffinity(0))[:2]
    rows = []
    say("the floor's other process")
    with Floor(request_bytes(plan, *most), result_bytes(*most), (cores[0], cores[1])) as floor:
        for hidden in plan.hidden:
            say(f"hidden {hidden}: starting a server that computes nothing")
            with working([null_server(plan, hidden, most[1], _SLOTS)]) as (server,):
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
                        room = caller.room(plan.top_k)
                        for tokens in plan.tokens:
                            what = f"{transport} hidden {hidden} T={tokens}"
                            if tokens > room:
                                reason = f"a slot takes {room} tokens over this transport"
                                skipped.append({"what": what, "reason": reason})
                                continue
                            say(f"{what}: {plan.rounds} rounds")
                            rows.append(bench_cell(plan, transport, hidden, tokens, caller, floor))
    return rows


def _settings(plan: Plan) -> dict[str, Any]:
    config = load_config()
    return {
        "dtype": "bfloat16",
        "top_k": plan.top_k,
        "experts": plan.num_experts,
        "slot_tokens": max(plan.tokens),
        "server_spin_us": config.expert_server.spin_us,
        "client_spin_us": config.attention_client.spin_us,
        "client_slots": _SLOTS,
        "rounds": plan.rounds,
        "turn_s": plan.turn_s,
    }


class _Usage:
    """What cores have done since now."""

    def __init__(self) -> None:
        self._wall, self._all, self._own = time.monotonic(), busy_core_seconds(), _own_s()

    def busy_elsewhere(self) -> float:
        """Cores that others kept busy, on average; to be asked once all children were waited for."""
        others = busy_core_seconds() - self._all - (_own_s() - self._own)
        return round(max(0.0, others) / (time.monotonic() - self._wall), 2)


def _own_s() -> float:
    """Processor seconds of this process and of the children that it waited for."""
    return sum(os.times()[:4])
