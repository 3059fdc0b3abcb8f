"""Measures what further servers cost a layer call: each sleeps as long as the only one does.

A server that sleeps needs no core. So the times are those of a machine with a core for each process.
"""

from __future__ import annotations

from contextlib import ExitStack
from statistics import median
from typing import Any

import torch

from attention_client.layer_call.calls import LayerCalls
from benchmarks.dispatch.caller import Caller, joint_calls, random_request
from benchmarks.dispatch.plan import Plan
from benchmarks.dispatch.server import null_server
from benchmarks.dispatch.turns import Turn, take_turn
from eaas_cli.bench.figures import figure
from eaas_cli.bench.worker import working
from eaas_cli.local.fork_server import ForkServer

__all__ = ["bench_servers"]


def bench_servers(plan: Plan, slots: int, fork_server: ForkServer) -> dict[str, Any]:
    """Measure a layer call to all servers and to one, in turn; return the document's `servers`."""
    hidden, tokens = plan.hidden[0], plan.upkeep_tokens
    request = random_request(tokens, hidden, plan.num_experts, plan.top_k)
    ids_TK, scores_TK = torch.from_numpy(request.ids_TK), torch.from_numpy(request.scores_TK)

    def p50_us(calls: LayerCalls) -> float:
        def call() -> None:
            calls.run(0, request.x_TH, ids_TK, scores_TK, None)

        return Turn.of(take_turn(call, plan.turn_s)).p50_us

    starts = [
        null_server(plan, hidden, tokens, slots, plan.sleep_us, f"server-{number}")
        for number in range(plan.servers)
    ]
    with working(starts, fork_server) as servers, ExitStack() as stack:
        sizes = {"hidden": hidden, "num_experts": plan.num_experts, "top_k": plan.top_k}
        callers = [
            stack.enter_context(
                Caller(str(server.address), plan.transports[0], name="client", slots=slots, **sizes)
            )
            for server in servers
        ]
        one, together = joint_calls(callers[:1], plan), joint_calls(callers, plan)
        rounds = [(p50_us(one), p50_us(together)) for _ in range(plan.rounds)]
    return {
        "tokens": tokens,
        "servers": plan.servers,
        "sleep_us": plan.sleep_us,
        "one_us": figure(median(one_us for one_us, _ in rounds)),
        "all_us": figure(median(all_us for _, all_us in rounds)),
        "ratio": figure(median(one_us / all_us for one_us, all_us in rounds)),
    }
