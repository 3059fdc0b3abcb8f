"""The run of `python -m benchmarks.join`.

A second server joins a cluster of one and gets half of the experts. The time from its registration (JOINING)
to SERVING is compared with the raw speed of the medium.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attention_client.cluster import Cluster
from benchmarks.join.checkpoint import write_checkpoint
from benchmarks.join.media import disk_rate, evict, loopback_rate
from benchmarks.join.others import Others, joined_client, percentile
from eaas.config import ClusterConfig, load_config
from eaas.errors import ClusterError
from eaas.types import MemberState
from eaas_cli.bench.machine import describe_machine
from eaas_cli.bench.worker import with_fork_server
from eaas_cli.local import LocalCluster
from eaas_cli.local.fork_server import CONTROL_MODULES, SERVER_MODULES, ForkServer

__all__ = ["bench_join"]

_JOIN_S = 300.0
_POLL_S = 0.002
# Pause after SERVING, in which the other server unloads experts.
_AFTER_S = 1.0
# Warm-up of the client's calls, which fills slot views and caches.
_WARM_S = 1.0


def bench_join(
    *,
    share_bytes: int,
    sources: Sequence[str],
    tokens: int,
    calls_per_s: float,
    quiet_s: float,
    rounds: int,
    say: Callable[[str], None],
    fork_server: ForkServer | None = None,
) -> dict[str, Any]:
    """Measure how a second expert server joins, for each source of its weights.

    Args:
        share_bytes: Weights for the new server.
        sources: Sources of the weights: disk, peers.
        tokens: Tokens per layer call of the other client.
        calls_per_s: Calls per second of that client.
        quiet_s: Seconds of measurement before a join.
        rounds: Joins per source.
        say: Prints a line of progress.
        fork_server: Forks the processes, and keeps running afterwards. None: the run starts its own.

    Returns:
        The JSON document. `ratio.rate` is the rate from JOINING to SERVING over that of the medium, measured
        just before; `ratio.slowest` is the slowest call during the join over the p99 before.

    Raises:
        EaasError: A process did not start, a request failed, or the server did not join in time.
    """
    config = load_config()
    with (
        with_fork_server(CONTROL_MODULES + SERVER_MODULES, fork_server) as forks,
        tempfile.TemporaryDirectory(prefix="eaas-bench-") as scratch,
    ):
        model = Path(scratch) / "model"
        say(f"writing a checkpoint of {2 * share_bytes / 1e9:.1f} GB ...")
        share_bytes = write_checkpoint(model, 2 * share_bytes) // 2
        rows = []
        for source in sources:
            for number in range(rounds):
                say(f"{source}, round {number + 1}")
                row = _join(model, source, share_bytes, tokens, calls_per_s, quiet_s, forks)
                rows.append({"source": source} | row)
    return {
        "machine": describe_machine(),
        "share_bytes": share_bytes,
        "tokens": tokens,
        "calls_per_s": calls_per_s,
        "limit_bytes_per_s": config.expert_server.share_bytes_per_s,
        "rows": rows,
    }


def _join(
    model: Path,
    source: str,
    share_bytes: int,
    tokens: int,
    calls_per_s: float,
    quiet_s: float,
    fork_server: ForkServer,
) -> dict[str, Any]:
    config: ClusterConfig = load_config()
    if source == "disk":
        medium = disk_rate(model, share_bytes)
    else:
        medium = min(loopback_rate(share_bytes), config.expert_server.share_bytes_per_s)
    with (
        LocalCluster(
            model,
            servers=1,
            redundancy=1,
            attention_client=False,
            config=config,
            fork_server=fork_server,
        ) as cluster,
        joined_client(model, cluster.monitor_address) as client,
    ):
        others = Others(client, tokens, calls_per_s)
        with others.calling():
            time.sleep(_WARM_S + quiet_s)
            evict(model)
            launched = time.monotonic()
            cluster.add_server(model=source == "disk")
            joined, serving = _watch(client, cluster)
            time.sleep(_AFTER_S)
    before = others.seconds(others.calls[0][0] + _WARM_S, launched)
    meanwhile = others.seconds(joined, serving + _AFTER_S)
    rate, p99 = share_bytes / (serving - joined), percentile(before, 0.99)
    slowest = max(meanwhile, default=math.nan)
    return {
        "medium_mb_per_s": round(medium / 1e6, 1),
        "join_s": round(serving - joined, 3),
        "start_to_serving_s": round(serving - launched, 3),
        "join_mb_per_s": round(rate / 1e6, 1),
        "before_ms": {
            "p50": round(percentile(before, 0.5) * 1e3, 3),
            "p99": round(p99 * 1e3, 3),
            "slowest": round(max(before, default=math.nan) * 1e3, 3),
        },
        "meanwhile_ms": {
            "p50": round(percentile(meanwhile, 0.5) * 1e3, 3),
            "p99": round(percentile(meanwhile, 0.99) * 1e3, 3),
            "slowest": round(slowest * 1e3, 3),
        },
        "calls": {"before": len(before), "meanwhile": len(meanwhile)},
        "ratio": {"rate": round(rate / medium, 3), "slowest": round(slowest / p99, 3)},
    }


def _watch(client: Cluster, cluster: LocalCluster) -> tuple[float, float]:
    """Wait until the second server serves; return the times of JOINING and SERVING, in monotonic seconds.

    Raises ClusterError.
    """
    deadline = time.monotonic() + _JOIN_S
    name, joined = cluster.running_servers()[-1].name, 0.0
    while True:
        member = client.session.view.members.get(name)
        now = time.monotonic()
        if member is not None and not joined:
            joined = now
        if member is not None and member.state is MemberState.SERVING:
            return joined, now
        cluster.children[name].read()
        if now > deadline:
            raise ClusterError(f"{name} does not serve after {_JOIN_S:.0f} s")
        time.sleep(_POLL_S)
