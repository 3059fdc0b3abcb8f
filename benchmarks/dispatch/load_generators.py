"""Many clients and servers on one machine: more processes than cores, each client at all servers."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.dispatch.plan import Plan
from benchmarks.dispatch.server import null_server
from benchmarks.dispatch.turns import Turn, summary
from eaas_cli.bench.figures import figure
from eaas_cli.bench.worker import Worker, working
from eaas_cli.local.fork_server import ForkServer

__all__ = ["bench_load_generators"]

_ROUNDS = 3
# Extra time on a busy machine.
_PATIENCE_S = 60.0


def bench_load_generators(plan: Plan, slots: int, fork_server: ForkServer) -> dict[str, Any]:
    """Measure `crowd` of the document: exchanges of all clients at once, with each server in turn.

    Args:
        plan: Its first transport and first hidden size are used.
        slots: Slots of a client on each server.
        fork_server: Forks all processes.
    """
    transport, hidden, tokens = plan.transports[0], plan.hidden[0], plan.load_generator_tokens
    seconds = plan.watch_s / 2
    turns, asked = [], 0
    starts = [
        null_server(plan, hidden, tokens, plan.clients * slots, f"server-{number}")
        for number in range(plan.servers)
    ]
    with working(starts, fork_server) as servers:
        addresses = [server.address for server in servers]
        clients = [
            partial(
                Worker,
                f"client-{number}",
                "benchmarks.dispatch.load_generator_process",
                client=f"client-{number}",
                addresses=addresses,
                transport=transport,
                hidden=hidden,
                tokens=tokens,
                num_experts=plan.num_experts,
                top_k=plan.top_k,
                slots=slots,
            )
            for number in range(plan.clients)
        ]
        with working(clients, fork_server) as workers:
            for _ in range(_ROUNDS):
                for worker in workers:
                    worker.send({"seconds": seconds}, seconds + _PATIENCE_S)
                took_ns = [took for worker in workers for took in worker.receive()]
                turns.append(Turn.of(took_ns))
                asked += len(took_ns)
    found = summary(turns)
    return {
        "clients": plan.clients,
        "servers": plan.servers,
        "transport": transport,
        "hidden": hidden,
        "tokens": tokens,
        "p50_us": found["p50"],
        "p99_us": found["p99"],
        "ratio": figure(found["p99"] / found["p50"]),
        "exchanges_per_s": figure(asked / (_ROUNDS * seconds)),
    }
