"""Measure placement policies: planning time on one core, and quality of the plan; or replay traces.

The policies plan the same loads in turn. The document's `rows` have, for each policy and size:

    plan_ms, again_ms      a plan, and one with a current plan and changed loads: {min, median} of the wall
                           time, `cpu` (median processor time)
    limit_ms               allowed time on one core, of the default sizes
    peak_mb                what two plans add to the resident memory of their process; null if unknown
    par_mean, par_max, gap_mean
                           quality of the first plan; gap: PAR / lower bound
    nodes_ms, nodes_ratio  planning with nodes known; its ratio to `plan_ms` by the least processor times
    alone, nodes_alone     share of the experts with several replicas that has them on one node only, without
                           and with nodes known
    nodes_par_rise         the most that nodes add to a layer's PAR

With --trace, see `benchmarks.peers`.
"""

from __future__ import annotations

import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

from balancer.policies import Plan, names, plan
from eaas.cores import usable_cores
from eaas.errors import ConfigError
from eaas_cli.bench.command import command, end_on_sigterm, say, show
from eaas_cli.bench.machine import processor
from eaas_cli.commands.options import Json
from eaas_cli.console import print_figures, print_rows
from eaas_cli.errors import exit_with_one_line
from eaas_cli.option_values import known

__all__ = ["Size", "bench_policies", "parse_size", "peak_mb"]

# Spread of the experts' log-normal popularity (a few at ten times the mean); its change for the second plan.
_SIGMA, _CHANGE = 1.0, 0.3
_STATUS = Path("/proc/self/status")

_Spent = tuple[float, float]  # milliseconds of wall time and of this thread's processor time
Float = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Size:
    """The size of one planning task.

    Attributes:
        layers: L.
        experts: E.
        servers: S.
        slots: Replicas per layer.
        limit_ms: Allowed planning time on one core; None: no limit.
    """

    layers: int
    experts: int
    servers: int
    slots: int
    limit_ms: float | None = None


# Default tasks: DeepSeek-R1 at its published decode and prefill sizes, and a large cluster.
_SIZES = (
    Size(58, 256, 64, 320, 10.0),
    Size(58, 256, 288, 576, 25.0),
    Size(60, 512, 1000, 2000, 1000.0),
)


def main(
    size: Annotated[
        list[str] | None,
        typer.Option(
            metavar="L,E,S,P",
            help="Layers, experts, servers, replicas per layer. Repeatable.",
            show_default="58,256,64,320; 58,256,288,576; 60,512,1000,2000",
        ),
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="Policy to measure. Repeatable.", show_default="all")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Plans per policy and size.")] = 9,
    nodes: Annotated[
        int,
        typer.Option(
            min=2,
            help="Plan also with the servers dealt to this many nodes, and compare the times.",
        ),
    ] = 8,
    trace: Annotated[
        list[Path] | None,
        typer.Option(
            help="Routing trace to replay, instead of measuring planning time. Repeatable."
        ),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATH",
            help="With --trace: checkout of vllm, sglang or vllm-ascend, whose balancers run, too. "
            "Its code is run. Repeatable.",
        ),
    ] = None,
    servers: Annotated[int, typer.Option(min=1, help="With --trace: number of servers.")] = 64,
    interval: Annotated[
        int, typer.Option(min=1, help="With --trace: iterations between plans.")
    ] = 1024,
    as_json: Json = False,
) -> None:
    """Measure placement policies: planning time on one core, and quality of the plan; or replay traces."""
    end_on_sigterm()
    if peer and not trace:
        raise ConfigError("--peer: give a --trace to replay")
    if trace:
        from benchmarks.peers import compare_peers, print_peers

        document = compare_peers(
            peer or (), trace, policies=policy or (), servers=servers, interval=interval
        )
        show(document, as_json, print_peers)
        return
    sizes = [parse_size(text) for text in size] if size else _SIZES
    document = bench_policies(sizes, policy or (), rounds=rounds, nodes=nodes, say=say)
    show(document, as_json, _report)


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
        The JSON document (see the module).

    Raises:
        ConfigError: A policy is unknown.
    """
    chosen = known("--policy", policies, names()) or names()
    rows: list[dict[str, Any]] = []
    for size in sizes:
        say(f"{size.layers} x {size.experts}, {size.servers} servers, {size.slots} slots")
        rows += _rows(size, chosen, rounds, nodes)
    return {
        "machine": {"processor": processor(), "cores": usable_cores()},
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "rounds": rounds,
        "rows": rows,
    }


def _rows(size: Size, policies: Sequence[str], rounds: int, nodes: int) -> list[dict[str, Any]]:
    load_LE, later_LE = _loads(size)
    nodes_S = np.arange(size.servers) * nodes // size.servers
    first = {policy: _plan(policy, load_LE, size) for policy in policies}
    known_nodes = {policy: _plan(policy, load_LE, size, nodes_S=nodes_S) for policy in policies}
    spent: dict[tuple[str, str], list[_Spent]] = {}
    for _ in range(rounds):
        for policy in policies:
            for kind, took in (
                ("plan", _measured(policy, load_LE, size)),
                ("nodes", _measured(policy, load_LE, size, nodes_S=nodes_S)),
                ("again", _measured(policy, later_LE, size, first[policy])),
            ):
                spent.setdefault((policy, kind), []).append(took)
    rows = []
    for policy in policies:
        found, with_nodes = first[policy], known_nodes[policy]
        least_cpu = {kind: min(cpu for _, cpu in spent[policy, kind]) for kind in ("plan", "nodes")}
        rows.append(
            {
                "policy": policy,
                "layers": size.layers,
                "experts": size.experts,
                "servers": size.servers,
                "slots": size.slots,
                "plan_ms": _summary(spent[policy, "plan"]),
                "again_ms": _summary(spent[policy, "again"]),
                "limit_ms": size.limit_ms,
                "peak_mb": peak_mb(policy, size),
                "par_mean": float(found.par_L.mean()),
                "par_max": float(found.par_L.max()),
                "gap_mean": float(found.gap_L.mean()),
                "nodes_ms": _summary(spent[policy, "nodes"]),
                "nodes_ratio": least_cpu["nodes"] / least_cpu["plan"],
                "alone": _alone(found, nodes_S),
                "nodes_alone": _alone(with_nodes, nodes_S),
                "nodes_par_rise": float((with_nodes.par_L / found.par_L).max() - 1),
            }
        )
    return rows


def parse_size(text: str) -> Size:
    """Parse the option's L,E,S,P (layers, experts, servers, slots). Raises ConfigError."""
    try:
        layers, experts, servers, slots = map(int, text.split(","))
    except ValueError:
        layers = experts = servers = slots = 0
    if min(layers, experts, servers) < 1 or not experts <= slots <= experts * servers:
        raise ConfigError(
            f"--size {text}: give layers, experts, servers and slots as L,E,S,P, with "
            "slots from E to E x S"
        )
    return Size(layers, experts, servers, slots)


def _loads(size: Size) -> tuple[Float, Float]:
    """float64 (L, E) twice: the load of the first plan, and that of the plan after it."""
    rng = np.random.default_rng(0)
    load_LE = 1e4 * rng.lognormal(0, _SIGMA, (size.layers, size.experts))
    return load_LE, load_LE * rng.lognormal(0, _CHANGE, load_LE.shape)


def peak_mb(policy: str, size: Size) -> float | None:
    """Plan twice, the second time with the first plan as the current one; return what that adds to a process.

    Returns:
        MB, loads and plans included; None where the system does not tell (other than Linux).
    """
    if not _STATUS.exists():
        return None
    with multiprocessing.get_context("spawn").Pool(1) as process:
        return process.apply(_grown_mb, (policy, size))


def _grown_mb(policy: str, size: Size) -> float:
    before = _status_bytes("VmRSS")
    load_LE, later_LE = _loads(size)
    _plan(policy, later_LE, size, _plan(policy, load_LE, size))
    return (_status_bytes("VmHWM") - before) / 1e6


def _status_bytes(name: str) -> int:
    """Return a value of the process's memory: resident now (VmRSS), or at its peak (VmHWM)."""
    return int(_STATUS.read_text().partition(f"{name}:")[2].split()[0]) * 1024


def _plan(
    policy: str,
    load_LE: Float,
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
    load_LE: Float,
    size: Size,
    current: Plan | None = None,
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


def _report(document: dict[str, Any]) -> None:
    print_figures(document["machine"])
    columns = (
        "policy",
        "servers",
        "slots",
        "plan_ms",
        "again_ms",
        "limit_ms",
        "peak_mb",
        "par_mean",
    )
    nodes = ("gap_mean", "nodes_ratio", "alone", "nodes_alone", "nodes_par_rise")
    print_rows(document["rows"], columns + nodes)


app = command(main)

if __name__ == "__main__":
    exit_with_one_line(app)
