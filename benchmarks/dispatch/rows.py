"""The rows: layer calls over each transport, and the floor, in turn."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from attention_client.engines.staging import Staging
from attention_client.layer_call.layer_calls import LayerCalls
from benchmarks.dispatch.floor import Floor
from benchmarks.dispatch.plan import SLOTS, Plan
from benchmarks.harness.lone_client import Request, connected, layer_calls, random_request
from benchmarks.harness.lone_server import lone_server
from benchmarks.harness.ratios import Turn, over, summary, take_turn
from benchmarks.harness.worker import working
from eaas.wire.header import (
    REQUEST_HEADER_BYTES,
    RESULT_HEADER_BYTES,
    WireDtype,
    payload_layout,
    result_length,
)
from eaas_cli.bench.command import ratio
from eaas_cli.bench.experts.run import affordable_rounds
from eaas_cli.local.fork_server import ForkServer

__all__ = ["Round", "bench_rows", "row_of"]

# Time limit of a row; a slow one has fewer rounds, at least three.
_ROW_S = 8.0


class Round(NamedTuple):
    """One round of a row: a turn of each measurement. `device_call`: None without a device."""

    floor: Turn
    layer_call: Turn
    device_call: Turn | None = None


def bench_rows(
    plan: Plan,
    say: Callable[[str], None],
    skipped: list[dict[str, str]],
    fork_server: ForkServer,
    device: torch.device | None = None,
) -> list[dict[str, Any]]:
    """Measure every transport, hidden size and number of tokens; add to `skipped` what no slot holds."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    most = max(plan.tokens)
    rows = []
    floor = Floor(*_bytes(plan, max(plan.hidden), most), (first, second))
    for hidden in plan.hidden:
        say(f"hidden {hidden}: starting a server that computes nothing")
        shape = plan.shape(hidden)
        with working([lone_server(shape, tokens=most, slots=SLOTS)], fork_server) as (server,):
            for transport in plan.transports:
                with connected(server.address, transport, shape, slots=SLOTS) as link:
                    capacity = link.max_tokens(plan.top_k, WireDtype.BFLOAT16)
                    calls = layer_calls([link], shape)
                    for tokens in plan.tokens:
                        what = f"{transport} hidden {hidden} T={tokens}"
                        if tokens > capacity:
                            reason = f"a slot takes {capacity} tokens over this transport"
                            skipped.append({"what": what, "reason": reason})
                            continue
                        say(f"{what}: {plan.rounds} rounds")
                        sizes = _bytes(plan, hidden, tokens)
                        request = random_request(tokens, shape)
                        rounds = _rounds(plan, sizes, calls, request, floor, device)
                        rows.append(row_of(transport, hidden, tokens, sizes, rounds))
    return rows


def row_of(
    transport: str, hidden: int, tokens: int, sizes: tuple[int, int], rounds: Sequence[Round]
) -> dict[str, Any]:
    """Make a row: medians over the rounds of the times, their differences and their ratios."""
    calls_us = [one.layer_call.p50_us for one in rounds]
    floors_us = [one.floor.p50_us for one in rounds]
    from_device = [one.device_call for one in rounds if one.device_call is not None]
    return {
        "transport": transport,
        "hidden": hidden,
        "tokens": tokens,
        "floor_us": summary([one.floor for one in rounds]),
        "layer_call_us": summary([one.layer_call for one in rounds]),
        "over_floor_us": over(calls_us, floors_us),
        "times_floor": ratio(calls_us, floors_us),
        **({"device_call_us": summary(from_device)} if from_device else {}),
        "request_bytes": sizes[0],
        "result_bytes": sizes[1],
        "rounds": len(rounds),
        "calls": sum(one.layer_call.calls for one in rounds),
    }


def _bytes(plan: Plan, hidden: int, tokens: int) -> tuple[int, int]:
    """Bytes of a request and of its result in a slot: header and payload."""
    payload = payload_layout(tokens, hidden, plan.top_k, WireDtype.BFLOAT16).total
    result = result_length(tokens, hidden)
    return REQUEST_HEADER_BYTES + payload, RESULT_HEADER_BYTES + result


def _rounds(
    plan: Plan,
    sizes: tuple[int, int],
    calls: LayerCalls,
    request: Request,
    floor: Floor,
    device: torch.device | None,
) -> list[Round]:
    from_device = None if device is None else _call_from(device, calls, request)

    def one_round() -> Round:
        return Round(
            floor.turn(*sizes, plan.turn_s / 2),
            take_turn(lambda: request.call(calls), plan.turn_s),
            None if from_device is None else take_turn(from_device, plan.turn_s),
        )

    started = time.monotonic()
    rounds = [one_round()]
    count = affordable_rounds(plan.rounds, time.monotonic() - started, _ROW_S)
    return rounds + [one_round() for _ in range(count - 1)]


def _call_from(at: torch.device, calls: LayerCalls, request: Request) -> Callable[[], torch.Tensor]:
    """Return what makes a layer call for tensors on a device; it ends when the result is there.

    The copies are those of the engines.
    """
    tensors = [tensor.to(at) for tensor in (request.x_TH, request.ids_TK, request.scores_TK)]
    staging = Staging()
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def call() -> torch.Tensor:
        staged = staging.to_host(*tensors)
        x_TH, ids_TK, scores_TK = staged.tensors
        summed_TH = Request(x_TH, ids_TK, scores_TK).call(calls)
        result_TH = staged.to_device(summed_TH.to(x_TH.dtype))
        arrived.record()
        arrived.synchronize()
        return result_TH

    return call
