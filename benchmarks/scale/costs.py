"""Unit costs of a large cluster outside the monitor: planner, policies, placements."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from balancer.persistence.write_ahead import _MOST_BYTES
from benchmarks.policies import Size, bench_policies
from benchmarks.scale.cluster import Cluster, Sizes
from eaas.types import Placement
from eaas_cli.bench.command import figure

__all__ = ["bench_balancer"]

_POLICIES = ("spread", "fractional", "scalpel", "eplb", "eplb-hierarchical")
_REST_S = 200.0


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
