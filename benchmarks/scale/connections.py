"""Costs of a connection between a client and an expert server, and of its slots."""

from __future__ import annotations

import gc
import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from attention_client.connections.opening import open_connection
from attention_client.connections.transports import opener
from attention_client.telemetry.metrics import ClientMetrics
from benchmarks.dispatch.plan import make_plan
from benchmarks.dispatch.server import null_server
from benchmarks.dispatch.sizes import model_shape
from eaas.config import AttentionClientConfig
from eaas.types import Member, MemberState, Role
from eaas.wire.arena import arena_bytes
from eaas.wire.header import WireDtype, payload_layout, result_length
from eaas_cli.bench.figures import figure
from eaas_cli.bench.worker import working

__all__ = ["bench_connections", "slot_bytes"]

# Connections that are opened; the server refuses more than 64 streams.
_CONNECTIONS = 48
_SLOTS = 2
_HIDDEN, _TOKENS = 64, 1


def bench_connections() -> dict[str, dict[str, float]]:
    """Open connections over gRPC to a server process; return each end's cost of one, without its slots.

    Returns:
        `server` and `client`: kb of memory, threads, files (descriptors).
    """
    plan = make_plan(
        transports=("grpc",),
        known_transports=("grpc",),
        hidden=str(_HIDDEN),
        tokens=str(_TOKENS),
        rounds=1,
        with_server=False,
    )
    start = null_server(plan, _HIDDEN, _TOKENS, _CONNECTIONS * _SLOTS)
    shape = model_shape(_HIDDEN, plan.num_experts, plan.top_k)
    with working([start]) as (server,), ExitStack() as stack:
        assert server.address is not None
        member = Member(
            "server", Role.EXPERT_SERVER, 1, "h", server.address, MemberState.SERVING, 1
        )
        connect = partial(
            open_connection,
            member,
            1,
            lambda _connection: None,
            open_link=opener("grpc"),
            shape=shape,
            config=AttentionClientConfig(slots=_SLOTS),
            metrics=ClientMetrics(CollectorRegistry()),
            on_lost=lambda _connection: None,
            tls=None,
        )
        # The first one makes what all share.
        stack.callback(connect(client_id="first").close)
        before = [_used(pid) for pid in (server.pid, os.getpid())]
        for number in range(1, _CONNECTIONS):
            stack.callback(connect(client_id=f"client-{number}").close)
        gc.collect()
        after = [_used(pid) for pid in (server.pid, os.getpid())]
    each = [
        {key: figure((end[key] - begin[key]) / (_CONNECTIONS - 1)) for key in begin}
        for begin, end in zip(before, after, strict=True)
    ]
    return {"server": each[0], "client": each[1]}


def slot_bytes(tokens: int, hidden: int, top_k: int) -> int:
    """Return the bytes of one slot, of which each end of a connection has its own."""
    payload = payload_layout(tokens, hidden, top_k, WireDtype.FLOAT32).total
    result = result_length(tokens, hidden)
    return arena_bytes(3, payload, result) - arena_bytes(2, payload, result)


def _used(pid: int) -> dict[str, Any]:
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return {
        "kb": int(status["VmRSS"].split()[0]),
        "threads": int(status["Threads"]),
        "files": len(os.listdir(f"/proc/{pid}/fd")),
    }
