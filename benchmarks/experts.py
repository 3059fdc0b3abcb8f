"""Measure how fast a live expert server reads its experts, against the machine's read speed.

`eaas bench experts` calls a kernel in its own process. Here an expert server in a process of its own answers
requests from shared memory, layer after layer, as a model's forward passes send them: with its pages, its
threads, and their wake-ups. Between two requests the client computes for a while, as attention does.

    live          bytes of the experts that a request reads, over the time in its answer (`service_us`)
    round trip    the same bytes, over the time from the client's first store to its last load
    read          memory read by as many threads of the same server, before and after each round; the best of
                  several ways

The document of `python -m benchmarks.experts --json`: a row holds medians over the rounds, and `least` and
`most` of `live`. `live` and `round_trip` are fractions of `read`. There are so many layers that no cache
holds an expert until its next use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import mean, median
from typing import Annotated, Any

import typer

from benchmarks.harness.worker import Worker, working
from eaas.cores import usable_cores
from eaas.garbage_collection import collector_off
from eaas_cli.bench.command import command, end_on_sigterm, figure, say, show
from eaas_cli.bench.experts.plan import Shape, parse_shape
from eaas_cli.bench.machine import BusyElsewhere, describe_machine, last_level_cache_bytes
from eaas_cli.commands.options import Json
from eaas_cli.console import print_figures, print_rows
from eaas_cli.errors import exit_with_one_line
from eaas_cli.option_values import numbers

__all__ = ["bench_experts_live"]

_SHAPES = ["256,64,32,4", "1024,512,64,8", "2048,768,128,8"]
_PATIENCE_S = 60.0
_BFLOAT16_BYTES = 2
# Experts of all layers together, in last-level caches.
_CACHES = 8
_LEAST_CALLS, _ROUND_S, _WARM_CALLS = 24, 0.2, 8
_SLOTS = 2


def main(
    shape: Annotated[
        list[str], typer.Option(metavar="H,I,E,K", help="Experts of a layer. Repeatable.")
    ] = _SHAPES,
    tokens: Annotated[str, typer.Option(metavar="T,...", help="Batch sizes.")] = "1,2,4,8",
    threads: Annotated[
        int, typer.Option(min=0, help="The server's threads; 0 takes all cores.")
    ] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds per batch size.")] = 7,
    pause_us: Annotated[
        int, typer.Option(min=0, help="The client computes so long between two requests.")
    ] = 200,
    as_json: Json = False,
) -> None:
    """Measure how fast a live expert server reads its experts, against the machine's read speed."""
    end_on_sigterm()
    document = bench_experts_live(
        [parse_shape(text) for text in shape],
        numbers("--tokens", tokens),
        threads=threads or usable_cores(),
        rounds=rounds,
        pause_us=pause_us,
        say=say,
    )
    show(document, as_json, _report)


def bench_experts_live(
    shapes: Sequence[Shape],
    tokens: Sequence[int],
    *,
    threads: int,
    rounds: int,
    pause_us: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure a server for each shape; return the document. Sets torch's number of threads to 1.

    Raises EaasError: a process did not start or did not answer.
    """
    with collector_off():
        import torch

        from benchmarks.harness.lone_client import Request, connected, exchange
        from benchmarks.harness.lone_server import lone_server
        from eaas_cli.bench.experts.source import Batches

    # Threads of torch would spin on the server's cores after each batch that is made.
    torch.set_num_threads(1)
    elsewhere = BusyElsewhere()
    rows: list[dict[str, Any]] = []
    most = max(tokens)
    for shape in shapes:
        layer_bytes = shape.num_experts * shape.expert_size * _BFLOAT16_BYTES
        layers = max(1, -(-_CACHES * last_level_cache_bytes() // layer_bytes))
        say(f"{shape}: a server with {layers} layers")
        start = lone_server(shape, threads=threads, tokens=most, slots=_SLOTS, layers=layers)
        batches = Batches(shape, torch.bfloat16, most)
        with (
            working([start]) as (server,),
            connected(server.address, "shm", shape, slots=_SLOTS, layers=layers) as link,
        ):
            # Batches differ from call to call, and each is for the next layer.
            number = 0

            def send(count: int) -> tuple[int, int, int]:
                """Send a batch; return its experts' bytes, and service and round trip in nanoseconds."""
                nonlocal number
                number += 1
                batch = batches.get(count, number)  # noqa: B023 - called within the iteration
                request = Request(batch.x_TH, batch.ids_TK, batch.scores_TK, number % layers)  # noqa: B023
                started = time.perf_counter_ns()
                while time.perf_counter_ns() - started < pause_us * 1000:
                    pass
                started = time.perf_counter_ns()
                service_us = exchange(link, request)
                took_ns = time.perf_counter_ns() - started
                read = batch.active * shape.expert_size * _BFLOAT16_BYTES  # noqa: B023
                return read, service_us * 1000, took_ns

            for count in tokens:
                say(f"{shape} T={count}")
                rows.append(
                    {"shape": str(shape), "tokens": count} | _row(server, send, count, rounds)
                )
    return {
        "machine": describe_machine() | {"busy_cores_elsewhere": elsewhere.cores()},
        "threads": threads,
        "rounds": rounds,
        "pause_us": pause_us,
        "rows": rows,
    }


def _row(
    server: Worker, send: Callable[[int], tuple[int, int, int]], tokens: int, rounds: int
) -> dict[str, float]:
    live, trips, speeds, times = [], [], [], []
    for _ in range(rounds):
        before = _read(server)
        for _ in range(_WARM_CALLS):
            send(tokens)
        calls: list[tuple[int, int, int]] = []
        end = time.perf_counter() + _ROUND_S
        while len(calls) < _LEAST_CALLS or time.perf_counter() < end:
            calls.append(send(tokens))
        speed = mean((before, _read(server))) / 1e9
        read, service_ns, trip_ns = (sum(column) for column in zip(*calls, strict=True))
        live.append(read / service_ns / speed)
        trips.append(read / trip_ns / speed)
        times.append(service_ns / len(calls) / 1e3)
        speeds.append(speed)
    return {
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


def _report(document: dict[str, Any]) -> None:
    print_figures(document["machine"] | {"threads": document["threads"]})
    print_rows(document["rows"])


app = command(main)

if __name__ == "__main__":
    exit_with_one_line(app)
