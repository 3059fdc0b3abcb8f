"""Measures one cell (transport, H, T): floor, exchange, layer call and the client's part, in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from benchmarks.dispatch.caller import Caller, random_request
from benchmarks.dispatch.floor import Floor
from benchmarks.dispatch.on_device import call_from
from benchmarks.dispatch.plan import Plan
from benchmarks.dispatch.sizes import request_bytes, result_bytes
from benchmarks.dispatch.turns import LEAST_CALLS, Turn, summary, take_turn
from eaas_cli.bench.experts.measure import affordable_rounds
from eaas_cli.bench.figures import figure

__all__ = ["Round", "bench_cell", "cell_row"]

_NS = 1e9
# Time limit of a cell; a slow one has fewer rounds, at least three.
_CELL_S = 8.0


@dataclass(frozen=True)
class Round:
    """One round of a cell: a turn of each measurement.

    Attributes:
        floor, exchange, layer_call: In the order of measurement.
        client_us: Median time of a layer call outside the connection, microseconds.
        device_call: A layer call for tensors on a device; None: there is none.
    """

    floor: Turn
    exchange: Turn
    layer_call: Turn
    client_us: float
    device_call: Turn | None = None


def bench_cell(
    plan: Plan,
    transport: str,
    hidden: int,
    tokens: int,
    caller: Caller,
    floor: Floor,
    device: torch.device | None = None,
) -> dict[str, Any]:
    """Measure a cell; return its row of the document.

    Args:
        hidden, tokens: H, T.
        caller: Connected to a server that computes nothing.
        floor: Large enough for the bytes of the cell.
        device: Also make layer calls for tensors there.
    """
    sizes = request_bytes(plan, hidden, tokens), result_bytes(hidden, tokens)
    request = random_request(tokens, hidden, plan.num_experts, plan.top_k)

    from_device = None if device is None else call_from(device, caller, request)

    def one_round() -> Round:
        floor_ns = floor.turn(*sizes, plan.turn_s / 2)
        exchange_ns = take_turn(lambda: caller.exchange(request), plan.turn_s)
        layer_ns = take_turn(lambda: caller.layer_call(request), plan.turn_s)
        outside_ns = _outside(lambda: caller.outside_ns(request), plan.turn_s / 2)
        device_ns = None if from_device is None else take_turn(from_device, plan.turn_s)
        return Round(
            Turn.of(floor_ns),
            Turn.of(exchange_ns),
            Turn.of(layer_ns),
            median(outside_ns) / 1e3,
            None if device_ns is None else Turn.of(device_ns),
        )

    started = time.monotonic()
    rounds = [one_round()]
    count = affordable_rounds(plan.rounds, time.monotonic() - started, _CELL_S)
    rounds += [one_round() for _ in range(count - 1)]
    return cell_row(transport, hidden, tokens, sizes, rounds)


def cell_row(
    transport: str, hidden: int, tokens: int, sizes: tuple[int, int], rounds: Sequence[Round]
) -> dict[str, Any]:
    """Make a cell's row: medians over the rounds of the times, their differences and their ratios."""
    over = [one.exchange.p50_us - one.floor.p50_us for one in rounds]
    times = [one.exchange.p50_us / one.floor.p50_us for one in rounds]
    from_device = [one.device_call for one in rounds if one.device_call is not None]
    return {
        "transport": transport,
        "hidden": hidden,
        "tokens": tokens,
        "exchange_us": summary([one.exchange for one in rounds]),
        "floor_us": summary([one.floor for one in rounds]),
        "over_floor_us": figure(median(over)),
        "times_floor": figure(median(times)),
        "layer_call_us": summary([one.layer_call for one in rounds]),
        **({"device_call_us": summary(from_device)} if from_device else {}),
        "client_us": figure(median(one.client_us for one in rounds)),
        "request_bytes": sizes[0],
        "result_bytes": sizes[1],
        "rounds": len(rounds),
        "calls": sum(one.exchange.calls for one in rounds),
    }


def _outside(call: Callable[[], int], seconds: float) -> list[int]:
    """Call repeatedly for at least `seconds`; return the results, nanoseconds outside the connection."""
    took: list[int] = []
    end = time.perf_counter_ns() + int(seconds * _NS)
    while len(took) < LEAST_CALLS or time.perf_counter_ns() < end:
        took.append(call())
    return took
