"""The progress of a server's load is seen from its begin to its end: real processes, a slow load."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from eaas.cluster_snapshot.loading import Loading, LoadingFold
from eaas.config import load_config
from eaas.membership.monitors import Monitors
from eaas.types import Member, MemberState
from eaas_cli.demo_model import write_demo_model
from eaas_cli.local import LocalCluster
from waiting import eventually

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

LAYERS, EXPERTS, HIDDEN = 8, 8, 128
ONE = 3 * HIDDEN * (HIDDEN // 2) * 4  # Bytes of an expert.


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "demo"
    write_demo_model(path, layers=LAYERS, hidden=HIDDEN, experts=EXPERTS, top_k=2)
    return path


class Viewer:
    """Asks the monitor as `eaas up` does, and keeps what it saw of each server's load."""

    def __init__(self, monitors: Monitors) -> None:
        self._monitors = monitors
        self._fold = LoadingFold()
        self.members: dict[str, Member] = {}
        self.seen: dict[str, list[Loading]] = {}

    def look(self) -> dict[str, Loading]:
        members = self._monitors.now.members(10.0)
        assert members is not None
        self.members = {m.id: m for m in members}
        found = self._fold.take(members, time.monotonic())
        for name, loading in found.items():
            self.seen.setdefault(name, []).append(loading)
        return found

    def assert_grew(self, name: str) -> int:
        """A server's largest load was seen from its begin to its end; return its bytes."""
        # Changes of the placement may follow one another.
        total = max(loading.total_bytes for loading in self.seen[name])
        seen = [loading for loading in self.seen[name] if loading.total_bytes == total]
        loaded = [loading.loaded_bytes for loading in seen]
        assert loaded == sorted(loaded)
        assert all(count % ONE == 0 for count in (total, *loaded))
        assert loaded[0] <= total / 3
        assert loaded[-1] >= total * 2 / 3
        assert len(set(loaded)) >= 3
        assert seen[-1].bytes_per_s
        member = self.members[name]
        assert (member.loading_bytes, member.loaded_bytes) == (0, 0)
        return total


@pytest.fixture
def start(
    model: Path, start_cluster: Callable[..., LocalCluster], tmp_path: Path
) -> Iterator[Callable[..., tuple[LocalCluster, Viewer]]]:
    with contextlib.ExitStack() as stack:

        def begin(servers: int, **expert_server: Any) -> tuple[LocalCluster, Viewer]:
            file = tmp_path / "cluster.yaml"
            settings = {
                "monitor": {"heartbeat_s": 0.1},
                "balancer": {"dead_grace_s": 0.5},
                "expert_server": expert_server,
            }
            file.write_text(yaml.safe_dump(settings))
            cluster = start_cluster(
                model,
                servers=servers,
                redundancy=1,
                attention_client=False,
                config_file=file,
                config=load_config(file),
            )
            monitors = stack.enter_context(
                contextlib.closing(Monitors(cluster.monitor_address, cluster.tls))
            )
            viewer = Viewer(monitors)
            # The first heartbeats after the start may be on their way.
            eventually(lambda: not viewer.look())
            viewer.seen.clear()
            return cluster, viewer

        yield begin


def test_a_server_that_joins(start: Callable[..., tuple[LocalCluster, Viewer]]) -> None:
    """The other server sends it 3 MB of weights at 1 MB/s."""
    cluster, viewer = start(1, share_bytes_per_s=1_000_000)
    newcomer = cluster.add_server(model=False)

    def is_serving() -> bool:
        viewer.look()
        newcomer.read()
        member = viewer.members.get(newcomer.name)
        return member is not None and member.state is MemberState.SERVING

    eventually(is_serving)
    assert viewer.assert_grew(newcomer.name) == viewer.members[newcomer.name].experts * ONE
    assert set(viewer.seen) == {newcomer.name}


def test_servers_that_replace_a_dead_one(
    start: Callable[..., tuple[LocalCluster, Viewer]],
) -> None:
    """Each loads half of its experts at a limited rate, while it serves."""
    cluster, viewer = start(3, load_bytes_per_s=500_000)
    left = ("expert-server-0", "expert-server-1")
    os.kill(cluster.children["expert-server-2"].pid, signal.SIGKILL)

    def is_replaced() -> bool:
        loading = viewer.look()
        return not loading and sum(viewer.members[name].experts for name in left) == (
            LAYERS * EXPERTS
        )

    eventually(is_replaced)
    for name in left:
        viewer.assert_grew(name)
    assert set(viewer.seen) == set(left)
