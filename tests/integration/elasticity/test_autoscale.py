"""`eaas autoscale` with a real cluster: servers are added under load and removed without it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from completions import Load
from eaas_cli.local import LocalCluster
from eaas_cli.local.scaling import Scaler, ScaleWatch
from waiting import eventually

pytestmark = [
    pytest.mark.integration,
    pytest.mark.alone,
    pytest.mark.nightly,
    pytest.mark.timeout(300),
]

# On any machine a token takes longer than this target, and working servers are busier than half of this
# utilization. So load adds one server, and no load removes it.
CONFIG = """
autoscaler:
  target_utilization: 0.05
  latency_target_ms: 0.001
  max_servers: 3
  interval_s: 1.0
  cooldown_s: 1.0
  scale_in_window_s: 3.0
"""
PATIENCE_S = 90.0


class Launcher:
    """Starts and ends servers as the balancer asks, like `eaas up`."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._scaler = Scaler(cluster)
        self._watch = ScaleWatch(lambda: cluster.children["balancer"].address, self._scaler.want)

    def close(self) -> None:
        self._watch.close()

    def wait_for(self, servers: int) -> None:
        """Wait until exactly so many servers live, and all serve."""
        eventually(lambda: self._serve(servers), PATIENCE_S, f"{servers} servers")

    def _serve(self, servers: int) -> bool:
        self._scaler.step()
        url = f"{self._cluster.endpoint}/eaas/v1/status"
        members = httpx.get(url, timeout=10).json()["members"]
        alive = [
            m
            for m in members
            if m["role"] == "expert-server" and m["state"] not in ("DEAD", "LEFT")
        ]
        serving = [m for m in alive if m["state"] == "SERVING" and m["experts"]]
        return len(alive) == len(serving) == servers


def test_servers_come_with_load_and_go_without(
    checkpoint: Callable[..., Path], start_cluster: Callable[..., LocalCluster], tmp_path: Path
) -> None:
    cluster = start_cluster(checkpoint("qwen3_moe"), servers=2)
    config, said = tmp_path / "cluster.yaml", tmp_path / "said.txt"
    config.write_text(CONFIG)
    load = Load(cluster.endpoint, 4, 40)

    with ExitStack() as cleanup:
        launcher = Launcher(cluster)
        cleanup.callback(launcher.close)
        command = [sys.executable, "-m", "eaas_cli", "autoscale", "--config", str(config)]
        process = subprocess.Popen(
            [*command, "--join", cluster.monitor_address],
            stdout=cleanup.enter_context(said.open("w")),
            stderr=subprocess.PIPE,
            text=True,
        )
        cleanup.enter_context(process)
        cleanup.callback(process.kill)
        with load.running():
            launcher.wait_for(3)
        launcher.wait_for(2)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 0, errors
        # Not earlier: even one request can add a server.
        with load.running():
            pass
    lines = said.read_text().splitlines()
    changes = [line for line in lines if "->" in line]
    # Once up and once down; again only if the machine stalled meanwhile.
    steps = [line.removeprefix("servers: ").partition(":")[0] for line in changes]
    assert steps == ["2 -> 3", "3 -> 2"] * (len(steps) // 2)
    # The last request's load takes one server or two, depending on the machine.
    assert "but every expert's replicas need 2" in changes[-1] or "takes 2" in changes[-1]
