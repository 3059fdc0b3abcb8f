"""Measures a real layer through a server, against a call of the same kernel in that server's process.

The difference is dispatch, copies, slots, two wake-ups and combine. One of the two runs at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from benchmarks.dispatch.caller import Caller, Request
from benchmarks.dispatch.plan import Plan
from benchmarks.dispatch.server import kernel_server
from eaas.free_memory import free_bytes
from eaas_cli.bench.experts.cpu import settle
from eaas_cli.bench.experts.plan import Shape
from eaas_cli.bench.experts.source import Batches
from eaas_cli.bench.figures import figure
from eaas_cli.bench.worker import Worker, working
from eaas_cli.local.fork_server import ForkServer

__all__ = ["bench_layer", "lack_of_memory"]

_CALLS = 5
_PATIENCE_S = 60.0
_BFLOAT16_BYTES = 2
_PROCESS_BYTES = 1 << 30


def lack_of_memory(layer: Shape) -> str:
    """Reason why memory does not suffice to measure the layer; empty if it does."""
    # Room for the random weights, the kernel's copy, and the processes with torch.
    needed = 2 * layer.num_experts * layer.expert_size * _BFLOAT16_BYTES + _PROCESS_BYTES
    available = free_bytes()
    if needed <= available:
        return ""
    return f"needs {needed / 1e9:.1f} GB of memory, and {available / 1e9:.1f} GB are free"


def bench_layer(
    plan: Plan, slots: int, threads: int, fork_server: ForkServer
) -> list[dict[str, Any]]:
    """Measure a real layer with the plan's first transport; return the document's `layer`."""
    shape, most = plan.layer, max(plan.layer_tokens)
    batches = Batches(shape, torch.bfloat16, most)
    start = kernel_server(shape, threads=threads, tokens=most, slots=slots)
    with working([start], fork_server) as (server,):
        assert server.address is not None
        with Caller(
            server.address,
            plan.transports[0],
            hidden=shape.hidden,
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            name="client",
            slots=slots,
        ) as caller:
            every: dict[str, Any] = {
                "shape": str(shape),
                "dtype": "bfloat16",
                "transport": plan.transports[0],
            }
            every |= {"kernel": server.kernel, "threads": threads}
            return [
                every | _row(plan, tokens, caller, server, batches) for tokens in plan.layer_tokens
            ]


def _row(
    plan: Plan, tokens: int, caller: Caller, server: Worker, batches: Batches
) -> dict[str, Any]:
    """Measure calls of T tokens."""

    def through(seeds: Sequence[int]) -> list[int]:
        return [_timed(caller, batches, tokens, seed) for seed in seeds]

    def inside(seeds: Sequence[int]) -> list[int]:
        return _inside(server, tokens, seeds)

    pairs = _in_turn(through, inside, plan.rounds)
    return {
        "tokens": tokens,
        "in_process_ms": figure(median(inside_ms for _, inside_ms in pairs)),
        "through_server_ms": figure(median(through_ms for through_ms, _ in pairs)),
        "ratio": figure(median(through_ms / inside_ms for through_ms, inside_ms in pairs)),
        "over_ms": figure(median(through_ms - inside_ms for through_ms, inside_ms in pairs)),
        "calls": plan.rounds * _CALLS,
    }


def _in_turn(
    through: Callable[[Sequence[int]], list[int]],
    inside: Callable[[Sequence[int]], list[int]],
    rounds: int,
) -> list[tuple[float, float]]:
    """Time both ways in each round, on the same batches, in alternating order; median milliseconds."""
    through([0])
    inside([0])
    pairs = []
    for number in range(rounds):
        seeds = range(1 + number * _CALLS, 1 + (number + 1) * _CALLS)
        if number % 2:
            inside_ns, through_ns = inside(seeds), through(seeds)
        else:
            through_ns, inside_ns = through(seeds), inside(seeds)
        pairs.append((median(through_ns) / 1e6, median(inside_ns) / 1e6))
    return pairs


def _inside(server: Worker, tokens: int, seeds: Sequence[int]) -> list[int]:
    server.send({"tokens": tokens, "seeds": list(seeds)}, _PATIENCE_S)
    took: list[int] = server.receive()
    return took


def _timed(caller: Caller, batches: Batches, tokens: int, seed: int) -> int:
    """Time one layer call through the server, in nanoseconds."""
    batch = batches.get(tokens, seed)
    request = Request.of(batch.x_TH, batch.ids_TK.numpy(), batch.scores_TK.numpy())
    settle()
    started = time.perf_counter_ns()
    caller.layer_call(request)
    return time.perf_counter_ns() - started
