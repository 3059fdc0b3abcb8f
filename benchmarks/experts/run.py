"""The run: requests of few tokens to a live expert server, and reads of its memory, in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import mean, median
from typing import Any

import torch

from benchmarks.dispatch.caller import Caller, Request
from benchmarks.dispatch.server import kernel_server
from eaas_cli.bench.experts.plan import Shape
from eaas_cli.bench.experts.source import Batches
from eaas_cli.bench.figures import figure
from eaas_cli.bench.machine import BusyElsewhere, describe_machine, last_level_cache_bytes
from eaas_cli.bench.worker import Worker, working

__all__ = ["bench_experts_live"]

_PATIENCE_S = 60.0
_BFLOAT16_BYTES = 2
# Experts of all layers together, in last-level caches.
_CACHES = 8
_LEAST_CALLS, _ROUND_S, _WARM_CALLS = 24, 0.2, 8


def bench_experts_live(
    shapes: Sequence[Shape],
    tokens: Sequence[int],
    *,
    threads: int,
    rounds: int,
    pause_us: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure a server for each shape; return the document (see the package docstring).

    Sets torch's number of threads to 1.

    Raises:
        EaasError: A process did not start or did not answer.
    """
    # Threads of torch would spin on the server's cores after each batch that is made.
    torch.set_num_threads(1)
    elsewhere = BusyElsewhere()
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        layer_bytes = shape.num_experts * shape.expert_size * _BFLOAT16_BYTES
        layers = max(1, -(-_CACHES * last_level_cache_bytes() // layer_bytes))
        say(f"{shape}: a server with {layers} layers")
        start = kernel_server(shape, threads=threads, tokens=max(tokens), slots=2, layers=layers)
        with working([start]) as (server,):
            assert server.address is not None
            with Caller(
                server.address,
                "shm",
                hidden=shape.hidden,
                num_experts=shape.num_experts,
                top_k=shape.top_k,
                name="client",
                slots=2,
            ) as caller:
                client = _Client(caller, shape, layers, max(tokens), pause_us)
                for count in tokens:
                    say(f"{shape} T={count}")
                    rows.append(_row(server, client, shape, count, rounds))
    return {
        "machine": describe_machine() | {"busy_cores_elsewhere": elsewhere.cores()},
        "threads": threads,
        "rounds": rounds,
        "pause_us": pause_us,
        "rows": rows,
    }


class _Client:
    """Sends random batches, a layer after the other, and computes between them."""

    def __init__(self, caller: Caller, shape: Shape, layers: int, most: int, pause_us: int) -> None:
        self._caller, self._shape, self._layers = caller, shape, layers
        self._batches = Batches(shape, torch.bfloat16, most)
        self._pause_ns = pause_us * 1000
        self._calls = 0

    def send(self, tokens: int) -> tuple[int, int, int]:
        """Send one batch; return the bytes of its experts, and service and round trip in nanoseconds."""
        self._calls += 1
        batch = self._batches.get(tokens, self._calls)
        request = Request.of(
            batch.x_TH, batch.ids_TK.numpy(), batch.scores_TK.numpy(), self._calls % self._layers
        )
        read = batch.active * self._shape.expert_size * _BFLOAT16_BYTES
        started = time.perf_counter_ns()
        while time.perf_counter_ns() - started < self._pause_ns:
            pass
        started = time.perf_counter_ns()
        service_us = self._caller.exchange(request)
        return read, service_us * 1000, time.perf_counter_ns() - started


def _row(server: Worker, client: _Client, shape: Shape, tokens: int, rounds: int) -> dict[str, Any]:
    live, trips, speeds, times = [], [], [], []
    for _ in range(rounds):
        before = _read(server)
        for _ in range(_WARM_CALLS):
            client.send(tokens)
        calls: list[tuple[int, int, int]] = []
        end = time.perf_counter() + _ROUND_S
        while len(calls) < _LEAST_CALLS or time.perf_counter() < end:
            calls.append(client.send(tokens))
        speed = mean((before, _read(server))) / 1e9
        read, service_ns, trip_ns = (sum(column) for column in zip(*calls, strict=True))
        live.append(read / service_ns / speed)
        trips.append(read / trip_ns / speed)
        times.append(service_ns / len(calls) / 1e3)
        speeds.append(speed)
    return {
        "shape": str(shape),
        "tokens": tokens,
        "read_gb_per_s": figure(median(speeds)),
        "service_us": figure(median(times)),
        "live": figure(median(live)),
        "least": figure(min(live)),
        "most": figure(max(live)),
        "round_trip": figure(median(trips)),
    }


def _read(server: Worker) -> float:
    server.send("read", _PATIENCE_S)
    speed: float = server.receive()
    return speed
