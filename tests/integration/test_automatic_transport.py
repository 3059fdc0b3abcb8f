"""One client uses shared memory to one server and gRPC to another, whose memory it cannot see."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

import attention_client
from decoding import cluster_of, generate, ragged
from eaas_cli.chaos.child import VARIABLE
from eaas_cli.local import LocalCluster
from eaas_cli.local.fork_server import ForkServer
from eaas_cli.local.process import ChildProcess
from waiting import eventually

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

NEAR, FAR = "expert-server-0", "expert-server-1"
NEW_TOKENS = 16
SHARED_MEMORY = 256 << 20


def why_no_namespaces() -> str:
    """Why no process of this test can get namespaces of its own; empty if it can."""
    if os.geteuid() != 0:
        return "needs root for a pid and a mount namespace"
    # A process of its own: this one may have threads of gRPC, which does not survive a fork.
    code = "from eaas_cli.chaos.child import *; shrink_shared_memory(1 << 20); hide_processes()"
    tried = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    return "no pid and mount namespaces here" if tried.returncode else ""


class ApartCluster(LocalCluster):
    """A cluster with one server as in another container: own process ids, own /dev/shm, same host name."""

    apart = True

    def _start(self, name: str, arguments: Sequence[str], module: str = "eaas_cli") -> ChildProcess:
        if name != FAR or not self.apart:
            return super()._start(name, arguments, module)
        with pytest.MonkeyPatch.context() as patch:
            isolation = {"processes": True, "shared_memory": SHARED_MEMORY}
            patch.setenv(VARIABLE, json.dumps(isolation))
            return super()._start(name, arguments, "eaas_cli.chaos.child")


def transports(cluster: attention_client.Cluster) -> dict[str, str]:
    return {c.server_id: c.transport for c in cluster._servers.all() if c.lost_reason is None}


def exported(cluster: attention_client.Cluster, transport: str) -> float | None:
    registry = cluster.metrics.registry
    return registry.get_sample_value("eaas_server_connections", {"transport": transport})


def test_shm_to_one_server_and_grpc_to_another(
    checkpoint: Callable[..., Path], fork_server: ForkServer
) -> None:
    if why := why_no_namespaces():
        pytest.skip(why)
    path = checkpoint("qwen3_moe")
    with ApartCluster(path, servers=2, redundancy=1, clients=0, fork_server=fork_server) as cluster:
        model = attention_client.load(path, cluster.monitor_address)
        joined = cluster_of(model)
        assert joined.config.transport == "auto"
        assert transports(joined) == {NEAR: "shm", FAR: "grpc"}
        assert (exported(joined, "shm"), exported(joined, "grpc")) == (1, 1)
        inputs = ragged(4)
        mixed_BT = generate(model, inputs, NEW_TOKENS)
        # Both computed their experts, as each holds half of them.
        answered = {s.server_id: s.answered for s in joined.metrics.outcomes.read()}
        assert answered[NEAR] > NEW_TOKENS
        assert answered[FAR] > NEW_TOKENS

        # The server returns where the client sees its memory.
        cluster.apart = False
        cluster.children[FAR].signal(signal.SIGKILL)
        cluster.restart(FAR)
        eventually(lambda: transports(joined) == {NEAR: "shm", FAR: "shm"})
        eventually(lambda: not joined.uncovered())
        eventually(lambda: exported(joined, "shm") == 2)
        assert exported(joined, "grpc") == 0
        assert torch.equal(generate(model, inputs, NEW_TOKENS), mixed_BT)

        # And away again.
        cluster.apart = True
        cluster.children[FAR].signal(signal.SIGKILL)
        cluster.restart(FAR)
        eventually(lambda: transports(joined) == {NEAR: "shm", FAR: "grpc"})
        eventually(lambda: not joined.uncovered())
        assert torch.equal(generate(model, inputs, NEW_TOKENS), mixed_BT)
