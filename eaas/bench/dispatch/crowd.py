"""Many clients and many servers on one machine: more processes than cores, each client at all servers."""

from __future__ import annotations

from functools import partial
from typing import Any

from eaas.bench.dispatch.plan import Plan
from eaas.bench.dispatch.server import null_server
from eaas.bench.dispatch.turns import Turn, figure, summary
from eaas.bench.worker import Worker, working

__all__ = ["bench_crowd"]

_ROUNDS = 3
# For a process that waits for its turn on a busy machine.
_PATIENCE_S = 60.0


def bench_crowd(plan: Plan, slots: int) -> dict[str, Any]:
    """The document's `crowd`: exchanges of all clients at the same time, one server after another.

    Args:
        plan: Its first transport, first hidden size and crowd are used.
        slots: Of a client on each server.
    """
    transport, hidden, tokens = plan.transports[0], plan.hidden[0], plan.crowd_tokens
    seconds = plan.watch_s / 2
    turns, asked = [], 0
    starts = [
        null_server(plan, hidden, tokens, plan.clients * slots, f"server-{number}")
        for number in range(plan.servers)
    ]
    with working(starts) as servers:
        addresses = [server.address for server in servers]
        clients = [
            partial(
                Worker,
                f"client-{number}",
                "eaas.bench.dispatch.crowd_process",
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
        with working(clients) as workers:
            for _ in range(_ROUNDS):
                for worker in workers:
                    worker.tell({"seconds": seconds}, seconds + _PATIENCE_S)
                took_ns = [took for worker in workers for took in worker.hear()]
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
