"""The run: the placement policies plan the same loads in turn, on one core."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from balancer.policies import Plan, names, plan
from benchmarks.policies.loads import loads
from benchmarks.policies.memory import peak_mb
from benchmarks.policies.sizes import Size
from eaas.cores import usable_cores
from eaas_cli.bench.machine import processor
from eaas_cli.option_values import known

__all__ = ["bench_policies"]

_Spent = tuple[float, float]  # milliseconds of wall time and of this thread's processor time


def bench_policies(
    sizes: Sequence[Size],
    policies: Sequence[str],
    *,
    rounds: int,
    nodes: int = 8,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure the planning time of policies, and the quality of their plans.

    Args:
        sizes: Planning tasks.
        policies: Names; empty: all.
        rounds: Plans per policy and size, after one warm-up plan.
        nodes: Nodes that the servers are dealt to, in the plans that know them.

    Returns:
        The JSON document: `rows` with `plan_ms` (a `plan` call) and `again_ms` (with a current plan and
        changed loads), each with `min` and `median` of the wall time and `cpu`, the median processor time;
        and the quality of the first plan (`par_mean`, `par_max`, `gap_mean`). `peak_mb`: what two
        plans add to the resident memory of a process, at most; None if unknown. With nodes: `nodes_ms`, its
        ratio to `plan_ms` by the least processor times, the shares of experts with several replicas on one
        node only (`alone`, `nodes_alone`), and the most that a layer's PAR rises.

    Raises:
        ConfigError: A policy is unknown.
    """
    chosen = known("--policy", policies, names()) or names()
    rows = []
    for size in sizes:
        load_LE, later_LE = loads(size)
        say(f"{size.layers} x {size.experts}, {size.servers} servers, {size.slots} slots")
        first = {policy: _plan(policy, load_LE, size) for policy in chosen}
        spent: dict[str, list[_Spent]] = {policy: [] for policy in chosen}
        again: dict[str, list[_Spent]] = {policy: [] for policy in chosen}
        nodes_S = np.arange(size.servers) * nodes // size.servers
        apart = {policy: _plan(policy, load_LE, size, nodes_S=nodes_S) for policy in chosen}
        with_nodes: dict[str, list[_Spent]] = {policy: [] for policy in chosen}
        for _ in range(rounds):
            for policy in chosen:
                spent[policy].append(_measured(policy, load_LE, size, None))
                with_nodes[policy].append(_measured(policy, load_LE, size, None, nodes_S))
                again[policy].append(_measured(policy, later_LE, size, first[policy]))
        for policy in chosen:
            found = first[policy]
            rows.append(
                {
                    "policy": policy,
                    "layers": size.layers,
                    "experts": size.experts,
                    "servers": size.servers,
                    "slots": size.slots,
                    "plan_ms": _summary(spent[policy]),
                    "again_ms": _summary(again[policy]),
                    "limit_ms": size.limit_ms,
                    "peak_mb": peak_mb(policy, size),
                    "par_mean": float(found.par_L.mean()),
                    "par_max": float(found.par_L.max()),
                    "gap_mean": float(found.gap_L.mean()),
                    "nodes_ms": _summary(with_nodes[policy]),
                    "nodes_ratio": min(c for _, c in with_nodes[policy])
                    / min(c for _, c in spent[policy]),
                    "alone": _alone(found, nodes_S),
                    "nodes_alone": _alone(apart[policy], nodes_S),
                    "nodes_par_rise": float((apart[policy].par_L / found.par_L).max() - 1),
                }
            )
    return {
        "machine": {"processor": processor(), "cores": usable_cores()},
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "rounds": rounds,
        "rows": rows,
    }


def _plan(
    policy: str,
    load_LE: npt.NDArray[np.float64],
    size: Size,
    current: Plan | None = None,
    nodes_S: npt.NDArray[np.int64] | None = None,
) -> Plan:
    return plan(policy, load_LE, size.servers, size.slots, current=current, nodes_S=nodes_S)


def _alone(found: Plan, nodes_S: npt.NDArray[np.int64]) -> float:
    """Return the part of the experts with several replicas that has them all on one node."""
    layout = found.layout
    layers, servers, experts = layout.shape
    layer_N, server_N = np.divmod(layout.row_N, servers)
    expert_N = layer_N * experts + layout.expert_N
    nodes = int(nodes_S.max()) + 1
    on_nodes = np.unique(expert_N * nodes + nodes_S[server_N]) // nodes
    nodes_X = np.bincount(on_nodes, minlength=layers * experts)
    several_X = layout.count_LE.ravel() > 1
    return float((nodes_X[several_X] == 1).mean()) if several_X.any() else 0.0


def _measured(
    policy: str,
    load_LE: npt.NDArray[np.float64],
    size: Size,
    current: Plan | None,
    nodes_S: npt.NDArray[np.int64] | None = None,
) -> _Spent:
    start, start_cpu = time.perf_counter(), time.thread_time()
    _plan(policy, load_LE, size, current, nodes_S)
    return (time.perf_counter() - start) * 1e3, (time.thread_time() - start_cpu) * 1e3


def _summary(spent: Sequence[_Spent]) -> dict[str, Any]:
    wall_ms, cpu_ms = zip(*spent, strict=True)
    return {
        "min": round(min(wall_ms), 3),
        "median": round(statistics.median(wall_ms), 3),
        "cpu": round(statistics.median(cpu_ms), 3),
    }
