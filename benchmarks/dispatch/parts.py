"""The parts of the document after the rows: a server's processor time, and a real layer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from attention_client.layer_call.layer_calls import LayerCalls
from benchmarks.dispatch.plan import SLOTS, Plan
from benchmarks.harness.lone_client import Request, connected, layer_calls, random_request
from benchmarks.harness.lone_server import lone_server
from benchmarks.harness.ratios import over, summary, take_turn
from benchmarks.harness.worker import Worker, processor_s, working
from eaas.free_memory import free_bytes
from eaas_cli.bench.command import figure, ratio
from eaas_cli.bench.experts.places import Cpu
from eaas_cli.bench.experts.plan import Shape
from eaas_cli.bench.experts.source import Batches
from eaas_cli.local.fork_server import ForkServer

__all__ = ["bench_layer", "bench_server", "lack_of_memory"]

# Pause after a connection in which gRPC's threads settle.
_SETTLE_S = 0.5
# Pause that is longer than any server spins.
_PAUSE_S = 0.001
_CALLS = 5
_PATIENCE_S = 60.0
_BFLOAT16_BYTES = 2
_PROCESS_BYTES = 1 << 30


def bench_server(plan: Plan, fork_server: ForkServer) -> dict[str, Any]:
    """Measure a server that computes nothing, idle and busy; return the document's `server`."""
    transport, hidden, tokens = plan.transports[0], plan.hidden[0], plan.few_tokens
    shape = plan.shape(hidden)
    request = random_request(tokens, shape)
    with (
        working([lone_server(shape, tokens=tokens, slots=SLOTS)], fork_server) as (server,),
        connected(server.address, transport, shape, slots=SLOTS) as link,
    ):
        calls = layer_calls([link], shape)

        def call() -> None:
            request.call(calls)

        take_turn(call, 0)
        time.sleep(_SETTLE_S)
        ran_s = processor_s(server.pid)
        time.sleep(plan.watch_s)
        idle_s = processor_s(server.pid) - ran_s
        began, ran_s = time.monotonic(), processor_s(server.pid)
        done = take_turn(call, plan.watch_s).calls
        busy_s, took_s = processor_s(server.pid) - ran_s, time.monotonic() - began
        paused = [take_turn(call, plan.turn_s, pause_s=_PAUSE_S) for _ in range(plan.rounds)]
    return {
        "transport": transport,
        "hidden": hidden,
        "tokens": tokens,
        "idle_cpu_fraction": figure(idle_s / plan.watch_s),
        "busy_cpu_fraction": figure(busy_s / took_s),
        "calls_per_s": figure(done / took_s),
        "paused_call_us": summary(paused),
    }


def lack_of_memory(layer: Shape) -> str:
    """Reason why memory does not suffice to measure the layer; empty if it does."""
    # Room for the random weights, the kernel's copy, and the processes with torch.
    needed = 2 * layer.num_experts * layer.expert_size * _BFLOAT16_BYTES + _PROCESS_BYTES
    available = free_bytes()
    if needed <= available:
        return ""
    return f"needs {needed / 1e9:.1f} GB of memory, and {available / 1e9:.1f} GB are free"


def bench_layer(plan: Plan, threads: int, fork_server: ForkServer) -> list[dict[str, Any]]:
    """Measure a real layer through a server, against a call of the same kernel in that server's process.

    The difference is dispatch, copies, slots, two wake-ups and combine. One of the two runs at a time.

    Returns:
        The document's `layer`.
    """
    shape, most, transport = plan.layer, max(plan.layer_tokens), plan.transports[0]
    batches = Batches(shape, torch.bfloat16, most)
    start = lone_server(shape, threads=threads, tokens=most, slots=SLOTS)
    with (
        working([start], fork_server) as (server,),
        connected(server.address, transport, shape, slots=SLOTS) as link,
    ):
        calls = layer_calls([link], shape)
        rows = [_layer_row(plan, tokens, calls, server, batches) for tokens in plan.layer_tokens]
        every: dict[str, Any] = {"shape": str(shape), "dtype": "bfloat16", "transport": transport}
        every |= {"kernel": server.kernel, "threads": threads}
        return [every | row for row in rows]


def _layer_row(
    plan: Plan, tokens: int, calls: LayerCalls, server: Worker, batches: Batches
) -> dict[str, Any]:
    """Time calls of T tokens both ways in each round, on the same batches, in alternating order."""

    def through(seeds: Sequence[int]) -> float:
        return median(_timed(calls, batches, tokens, seed) for seed in seeds) / 1e6

    def inside(seeds: Sequence[int]) -> float:
        server.send({"tokens": tokens, "seeds": list(seeds)}, _PATIENCE_S)
        took: list[int] = server.receive()
        return median(took) / 1e6

    through([0]), inside([0])
    times_ms: dict[Any, list[float]] = {through: [], inside: []}
    for number in range(plan.rounds):
        seeds = range(1 + number * _CALLS, 1 + (number + 1) * _CALLS)
        for way in (inside, through) if number % 2 else (through, inside):
            times_ms[way].append(way(seeds))
    return {
        "tokens": tokens,
        "in_process_ms": figure(median(times_ms[inside])),
        "through_server_ms": figure(median(times_ms[through])),
        "ratio": ratio(times_ms[through], times_ms[inside]),
        "over_ms": over(times_ms[through], times_ms[inside]),
        "calls": plan.rounds * _CALLS,
    }


def _timed(calls: LayerCalls, batches: Batches, tokens: int, seed: int) -> int:
    """Time one layer call through the server, in nanoseconds."""
    batch = batches.get(tokens, seed)
    request = Request(batch.x_TH, batch.ids_TK, batch.scores_TK)
    time.sleep(Cpu.settle_s)
    started = time.perf_counter_ns()
    request.call(calls)
    return time.perf_counter_ns() - started
