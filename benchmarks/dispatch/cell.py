"""Measures one cell (transport, H, T): floor, exchange, layer call and the client's part, in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.dispatch.caller import Caller, random_request
from benchmarks.dispatch.floor import Floor
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
    """

    floor: Turn
    exchange: Turn
    layer_call: Turn
    client_us: float


def bench_cell(
    plan: Plan, transport: str, hidden: int, tokens: int, caller: Caller, floor: Floor
) -> dict[str, Any]:
    """Measure a cell; return its row of the document.

    Args:
        hidden, tokens: H, T.
        caller: Connected to a server that computes nothing.
        floor: Large enough for the bytes of the cell.
    """
    sizes = request_bytes(plan, hidden, tokens), result_bytes(hidden, tokens)
    request = random_request(tokens, hidden, plan.num_experts, plan.top_k)

    def one_round() -> Round:
        floor_ns = floor.turn(*sizes, plan.turn_s / 2)
        exchange_ns = take_turn(lambda: caller.exchange(request), plan.turn_s)
        layer_ns = take_turn(lambda: caller.layer_call(request), plan.turn_s)
        outside_ns = _outside(lambda: caller.outside_ns(request), plan.turn_s / 2)
        return Round(
            Turn.of(floor_ns),
            Turn.of(exchange_ns),
            Turn.of(layer_ns),
            median(outside_ns) / 1e3,
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
    return {
        "transport": transport,
        "hidden": hidden,
        "tokens": tokens,
        "exchange_us": summary([one.exchange for one in rounds]),
        "floor_us": summary([one.floor for one in rounds]),
        "over_floor_us": figure(median(over)),
        "times_floor": figure(median(times)),
        "layer_call_us": summary([one.layer_call for one in rounds]),
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
