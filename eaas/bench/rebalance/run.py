"""The runs of `eaas bench rebalance`.

Two servers serve; one of them loads replicas of what the other has, which take next to no part of the load.
So calls go where they went before, and what they take longer is the loading's doing.
"""

from __future__ import annotations

import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from eaas.balancer_client import BalancerClient
from eaas.bench.join.checkpoint import write_checkpoint
from eaas.bench.join.media import evict
from eaas.bench.join.others import Others, joined_client, percentile
from eaas.bench.machine import processor
from eaas.bench.worker import nursing
from eaas.cores import usable_cores
from eaas.errors import ClusterError
from eaas.local import LocalCluster
from eaas.local.nursery import CONTROL_MODULES, SERVER_MODULES, Nursery
from eaas.rpc.v1 import balancer_pb2
from eaas.types import Placement

__all__ = ["bench_rebalance"]

_ROLL_OUT_S = 300.0
# Seldom: who asks takes time that calls and loading would have.
_LOOK_S = 0.25
_WARM_S = 1.0
_LEAST_SHARE = 1 / 1024


def bench_rebalance(
    *,
    share_bytes: int,
    tokens: int,
    calls_per_s: float,
    quiet_s: float,
    rounds: int,
    say: Callable[[str], None],
    nursery: Nursery | None = None,
) -> dict[str, Any]:
    """Measure.

    Args:
        share_bytes: Of the replicas that one server loads.
        tokens: Of a layer call of the client that is served meanwhile.
        calls_per_s: Its pace.
        quiet_s: How long it is measured before each roll-out.
        rounds: Roll-outs.
        say: Progress, for people.
        nursery: Forks the processes; left running. By default one of its own does.

    Returns:
        The document of `eaas bench rebalance --json`. `ratio` is of a round the median call while replicas
        were loaded over the median call just before; the document's is the median of the rounds.

    Raises:
        EaasError: Something did not start, a request failed, or a roll-out did not end.
    """
    with (
        nursing(CONTROL_MODULES + SERVER_MODULES, nursery) as forks,
        tempfile.TemporaryDirectory(prefix="eaas-bench-") as scratch,
    ):
        model = Path(scratch) / "model"
        say(f"writing a checkpoint of {2 * share_bytes / 1e9:.1f} GB ...")
        share_bytes = write_checkpoint(model, 2 * share_bytes) // 2
        with (
            LocalCluster(
                model, servers=2, redundancy=1, attention_client=False, nursery=forks
            ) as cluster,
            joined_client(model, cluster.monitor_address) as client,
            BalancerClient(str(cluster.children["balancer"].address)) as balancer,
        ):
            others = Others(client, tokens, calls_per_s)
            with others.calling():
                time.sleep(_WARM_S)
                rows = []
                for number in range(rounds):
                    say(f"round {number + 1}")
                    rows.append(_round(model, balancer, others, share_bytes, quiet_s))
    return {
        "machine": {
            "processor": processor(),
            "cores": usable_cores(),
            "python": platform.python_version(),
        },
        "share_bytes": share_bytes,
        "tokens": tokens,
        "calls_per_s": calls_per_s,
        "rows": rows,
        "ratio": round(median(row["ratio"] for row in rows), 3),
    }


def _round(
    model: Path, balancer: BalancerClient, others: Others, share_bytes: int, quiet_s: float
) -> dict[str, Any]:
    before = balancer.placement()
    assert before is not None
    evict(model)
    began = time.monotonic()
    time.sleep(quiet_s)
    applied = time.monotonic()
    entry = _roll_out(balancer, _with_replicas(before))
    # From when it was asked for: servers were told at once.
    loaded = applied + entry.prepare_s
    usual, meanwhile = others.seconds(began, applied), others.seconds(applied, loaded)
    _roll_out(balancer, before)
    if not meanwhile:
        raise ClusterError(
            "no call was made while replicas were loaded: load more, or call oftener"
        )
    p50_s = percentile(usual, 0.5), percentile(meanwhile, 0.5)
    return {
        "prepare_s": round(entry.prepare_s, 3),
        "retire_s": round(entry.retire_s, 3),
        "load_mb_per_s": round(share_bytes / entry.prepare_s / 1e6, 1),
        "before_ms": _figures(usual),
        "meanwhile_ms": _figures(meanwhile),
        "calls": {"before": len(usual), "meanwhile": len(meanwhile)},
        "ratio": round(p50_s[1] / p50_s[0], 3),
    }


def _figures(seconds: list[float]) -> dict[str, float]:
    return {
        "p50": round(percentile(seconds, 0.5) * 1e3, 3),
        "p99": round(percentile(seconds, 0.99) * 1e3, 3),
    }


def _with_replicas(now: Placement) -> Placement:
    """The second server has everything, and takes what it took."""
    holds_LSE, shares_LSE = now.holds_LSE.copy(), now.shares_LSE.copy()
    new_LE = ~holds_LSE[:, 1]
    holds_LSE[:, 1] = True
    shares_LSE[:, 1][new_LE] = _LEAST_SHARE
    shares_LSE[:, 0][new_LE] = 1 - _LEAST_SHARE
    return Placement(0, now.servers, holds_LSE, shares_LSE.astype(np.float32))


def _roll_out(balancer: BalancerClient, wanted: Placement) -> balancer_pb2.HistoryEntry:
    """Has a placement rolled out; what the balancer says of that. Raises ClusterError."""
    balancer.apply_placement(wanted)
    deadline = time.monotonic() + _ROLL_OUT_S
    while time.monotonic() < deadline:
        entry = balancer.history(1)[0]
        if entry.retire_s:
            return entry
        time.sleep(_LOOK_S)
    raise ClusterError(f"a roll-out is not over after {_ROLL_OUT_S:.0f} s")
