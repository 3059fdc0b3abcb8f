"""Unit costs of a large cluster outside the monitor: planner, policies, placements; connections and slots."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from balancer.persistence.write_ahead import _MOST_BYTES
from benchmarks.harness.lone_client import connected
from benchmarks.harness.lone_server import lone_server
from benchmarks.harness.worker import working
from benchmarks.policies import Size, bench_policies
from benchmarks.scale.cluster import Cluster, Sizes
from eaas.types import Placement
from eaas.wire.arena import arena_bytes
from eaas.wire.header import WireDtype, payload_layout, result_length
from eaas_cli.bench.command import figure
from eaas_cli.bench.experts.plan import Shape

__all__ = ["bench_balancer", "bench_connections", "slot_bytes"]

_POLICIES = ("spread", "fractional", "scalpel", "eplb", "eplb-hierarchical")
_REST_S = 200.0
_SLOT_TOKENS = (256, 64, 16)
# Connections that are opened; the server refuses more than 64 streams.
_CONNECTIONS = 48
_SLOTS = 2
_SMALL = Shape(64, 1, 128, 8)


def bench_balancer(sizes: Sizes, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure the planner while a node is lost, the policies, and a placement's message.

    Returns:
        Part `balancer` of the document (see the package); times are of the processor.
    """
    say("the planner")
    cluster = Cluster(sizes)
    first_s = cluster.first_planning_s
    cluster.kill(cluster.on_node(0))
    cluster.run(_REST_S)
    placement = cluster.placement
    assert placement is not None
    data = placement.to_proto().SerializeToString()
    began = time.process_time()
    Placement.from_proto(placement.to_proto())
    take_ms = 1e3 * (time.process_time() - began)
    slots = sizes.experts * sizes.redundancy
    found = bench_policies(
        [Size(sizes.layers, sizes.experts, sizes.servers, max(slots, sizes.servers))],
        _POLICIES,
        rounds=1,
        nodes=sizes.nodes,
        say=say,
    )
    return {
        "planner": {
            "first_s": figure(first_s),
            "loss_s": figure(cluster.planning_s),
            "longest_s": figure(cluster.longest_s),
        },
        "placement": {"bytes": len(data), "record_limit": _MOST_BYTES, "take_ms": figure(take_ms)},
        "policies": [
            {
                "policy": row["policy"],
                "plan_ms": row["plan_ms"]["cpu"],
                "nodes_ms": row["nodes_ms"]["cpu"],
            }
            for row in found["rows"]
        ],
    }


def bench_connections(hidden: int, top_k: int) -> dict[str, Any]:
    """Open connections over gRPC to a server process; measure each end's cost of one, without its slots.

    Args:
        hidden, top_k: Of the model whose slots are counted.

    Returns:
        Part `connections` of the document (see the package).
    """
    start = lone_server(_SMALL, tokens=1, slots=_CONNECTIONS * _SLOTS)
    with working([start]) as (server,), ExitStack() as stack:

        def connect(number: int) -> None:
            opened = connected(
                server.address, "grpc", _SMALL, slots=_SLOTS, client_id=f"client-{number}"
            )
            stack.enter_context(opened)

        # The first one makes what all share.
        connect(0)
        before = [_used(pid) for pid in (server.pid, os.getpid())]
        for number in range(1, _CONNECTIONS):
            connect(number)
        gc.collect()
        after = [_used(pid) for pid in (server.pid, os.getpid())]
    server_cost, client_cost = (
        {key: figure((end[key] - begin[key]) / (_CONNECTIONS - 1)) for key in begin}
        for begin, end in zip(before, after, strict=True)
    )
    slots = [{"tokens": t, "bytes": slot_bytes(t, hidden, top_k)} for t in _SLOT_TOKENS]
    return {"server": server_cost, "client": client_cost, "slots": slots}


def slot_bytes(tokens: int, hidden: int, top_k: int) -> int:
    """Return the bytes of one slot, of which each end of a connection has its own."""
    payload = payload_layout(tokens, hidden, top_k, WireDtype.FLOAT32).total
    result = result_length(tokens, hidden)
    return arena_bytes(3, payload, result) - arena_bytes(2, payload, result)


def _used(pid: int) -> dict[str, int]:
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return {
        "kb": int(status["VmRSS"].split()[0]),
        "threads": int(status["Threads"]),
        "files": len(os.listdir(f"/proc/{pid}/fd")),
    }
