"""The progress of a server's load is seen from its begin to its end: real processes, a slow load."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from eaas.cluster_snapshot.loading import Loading, LoadingFold
from eaas.config import load_config
from eaas.membership.monitors import Monitors
from eaas.types import MemberState
from eaas_cli.demo_model import write_demo_model
from eaas_cli.local import LocalCluster
from waiting import eventually

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

HIDDEN = 128
ONE = 3 * HIDDEN * (HIDDEN // 2) * 4  # Bytes of an expert.


def test_a_server_that_joins(start_cluster: Callable[..., LocalCluster], tmp_path: Path) -> None:
    """The other server sends it 3 MB of weights at 1 MB/s; the monitor is asked as `eaas up` does."""
    model, file = tmp_path / "demo", tmp_path / "cluster.yaml"
    write_demo_model(model, layers=8, hidden=HIDDEN, experts=8, top_k=2)
    slow = {"share_bytes_per_s": 1_000_000}
    file.write_text(yaml.safe_dump({"monitor": {"heartbeat_s": 0.1}, "expert_server": slow}))
    cluster = start_cluster(
        model,
        servers=1,
        redundancy=1,
        clients=0,
        config_file=file,
        config=load_config(file),
    )
    fold, seen = LoadingFold(), dict[str, list[Loading]]()
    with contextlib.closing(Monitors(cluster.monitor_address, cluster.tls)) as monitors:

        def look() -> dict[str, Loading]:
            return fold.take(monitors.now.members(10.0) or [], time.monotonic())

        # The first heartbeats after the start may be on their way.
        eventually(lambda: not look())
        newcomer = cluster.add_server(model=False)

        def is_serving() -> bool:
            for name, loading in look().items():
                seen.setdefault(name, []).append(loading)
            newcomer.read()
            members = {m.id: m for m in monitors.now.members(10.0) or ()}
            member = members.get(newcomer.name)
            return member is not None and member.state is MemberState.SERVING

        eventually(is_serving)
        (member,) = (m for m in monitors.now.members(10.0) or () if m.id == newcomer.name)
    assert (member.loading_bytes, member.loaded_bytes) == (0, 0)
    assert set(seen) == {newcomer.name}
    total = member.experts * ONE
    loads = [loading for loading in seen[newcomer.name] if loading.total_bytes == total]
    loaded = [loading.loaded_bytes for loading in loads]
    assert loaded == sorted(loaded)
    assert all(count % ONE == 0 for count in loaded)
    assert loaded[0] <= total / 3
    assert loaded[-1] >= total * 2 / 3
    assert len(set(loaded)) >= 3
    assert loads[-1].bytes_per_s
