"""The runs of `eaas bench join`.

A cluster of one server serves; a second one joins and gets half of the experts. From its registration
(JOINING) to SERVING it takes as long as its weights take to come from their medium, plus what is lost.
"""

from __future__ import annotations

import math
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attention_client.cluster import Cluster
from eaas.bench.join.checkpoint import write_checkpoint
from eaas.bench.join.media import disk_rate, evict, loopback_rate
from eaas.bench.join.others import Others, joined_client, percentile
from eaas.bench.machine import processor
from eaas.config import ClusterConfig, load_config
from eaas.cores import usable_cores
from eaas.errors import ClusterError
from eaas.local import LocalCluster
from eaas.types import MemberState

__all__ = ["bench_join"]

_JOIN_S = 300.0
_LOOK_S = 0.002
# After SERVING the other server unloads what it gave away.
_AFTER_S = 1.0
# Of calls before the first that counts: the first ones make slots' views and fill caches.
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
) -> dict[str, Any]:
    """Measure.

    Args:
        share_bytes: Of the weights that the new server is to hold.
        sources: Where its weights come from: disk, peers.
        tokens: Of a layer call of the other client.
        calls_per_s: Its pace.
        quiet_s: How long it is measured before somebody joins.
        rounds: Joins of each source.
        say: Progress, for people.

    Returns:
        The document of `eaas bench join --json`. `ratio.rate` is the rate from JOINING to SERVING over the
        medium's own, measured just before; `ratio.slowest` is the slowest call of the other client in that
        time over its p99 before.

    Raises:
        EaasError: Something did not start, a request failed, or nobody joined in time.
    """
    config = load_config()
    with tempfile.TemporaryDirectory(prefix="eaas-bench-") as scratch:
        model = Path(scratch) / "model"
        say(f"writing a checkpoint of {2 * share_bytes / 1e9:.1f} GB ...")
        share_bytes = write_checkpoint(model, 2 * share_bytes) // 2
        rows = []
        for source in sources:
            for number in range(rounds):
                say(f"{source}, round {number + 1}")
                row = _join(model, source, share_bytes, tokens, calls_per_s, quiet_s)
                rows.append({"source": source} | row)
    return {
        "machine": {
            "processor": processor(),
            "cores": usable_cores(),
            "python": platform.python_version(),
        },
        "share_bytes": share_bytes,
        "tokens": tokens,
        "calls_per_s": calls_per_s,
        "limit_bytes_per_s": config.expert_server.share_bytes_per_s,
        "rows": rows,
    }


def _join(
    model: Path, source: str, share_bytes: int, tokens: int, calls_per_s: float, quiet_s: float
) -> dict[str, Any]:
    config: ClusterConfig = load_config()
    if source == "disk":
        medium = disk_rate(model, share_bytes)
    else:
        medium = min(loopback_rate(share_bytes), config.expert_server.share_bytes_per_s)
    with (
        LocalCluster(
            model, servers=1, redundancy=1, attention_client=False, config=config
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
    """When the second server was JOINING, and when it was SERVING. Monotonic seconds, by the monitor's word.

    Raises:
        ClusterError: It failed, or it takes too long.
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
        time.sleep(_LOOK_S)
