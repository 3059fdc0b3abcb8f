"""The run of `python -m benchmarks.scale`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from benchmarks.scale.balancer import bench_balancer
from benchmarks.scale.connections import bench_connections, slot_bytes
from benchmarks.scale.failures import simulate_failures, simulate_upgrade
from benchmarks.scale.monitor import bench_monitor_costs
from eaas_cli.bench.machine import describe_machine
from simulator.failures import Sizes

__all__ = ["bench_scale"]

_SLOT_TOKENS = (256, 64, 16)
# Layers of the simulated failures: they are alike.
_LAYERS = 8


def bench_scale(
    sizes: Sizes, *, hidden: int, top_k: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Measure and simulate; return the document (see the package).

    Args:
        sizes: The cluster.
        hidden: Hidden size of the model, for its slots.
        top_k: Experts per token.
        say: Told about the progress.

    Raises:
        EaasError: A process did not start.
    """
    say("connections")
    connections: dict[str, Any] = bench_connections()
    connections["slots"] = [
        {"tokens": tokens, "bytes": slot_bytes(tokens, hidden, top_k)} for tokens in _SLOT_TOKENS
    ]
    say("the monitor")
    monitor = bench_monitor_costs(sizes.servers + sizes.clients, sizes.servers)
    balancer = bench_balancer(sizes, say)
    fewer = replace(sizes, layers=min(_LAYERS, sizes.layers))
    return {
        "machine": describe_machine(),
        "settings": asdict(sizes) | {"hidden": hidden, "top_k": top_k, "simulated": fewer.layers},
        "connections": connections,
        "monitor": monitor,
        "balancer": balancer,
        "failures": simulate_failures(fewer, say),
        "upgrade": simulate_upgrade(replace(fewer, layers=min(2, fewer.layers)), say),
    }
