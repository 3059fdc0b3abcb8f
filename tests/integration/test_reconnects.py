"""Servers that are killed and started again and again under one client: it is connected each time."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry

from attention_client.cluster import Cluster
from attention_client.metrics import ClientMetrics
from eaas.checkpoint import Checkpoint
from eaas.config import AttentionClientConfig
from eaas.errors import EaasError
from eaas.local import LocalCluster

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PATIENCE_S = 60.0
ROUNDS = 5


def until(wanted: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not wanted():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_a_server_that_returns_is_connected_to_each_time(
    checkpoint: Callable[..., Path], start_cluster: Callable[..., LocalCluster], transport: str
) -> None:
    """Also where it is killed again before, while and just after the client connects to it."""
    cluster = start_cluster(checkpoint("qwen3_moe"), attention_client=False)
    shape = Checkpoint.open(cluster.model).shape
    dice, given = random.Random(5), torch.Generator().manual_seed(5)
    x_TH = torch.randn(8, shape.hidden_size, generator=given)
    ids_TK = torch.rand(8, shape.num_experts, generator=given).argsort(dim=1)[:, : shape.top_k]
    scores_TK = torch.rand(8, shape.top_k, generator=given)
    config = AttentionClientConfig(transport=transport)
    metrics = ClientMetrics(CollectorRegistry())
    over, failures, wrong = threading.Event(), list[EaasError](), list[torch.Tensor]()
    with closing(Cluster(cluster.monitor_address, shape, config, metrics)) as client:
        client.wait_until_covered(PATIENCE_S)

        def usable() -> int:
            return int(client.view().usable_S().sum())

        until(lambda: usable() == cluster.servers, "not all are connected at first")
        expected_TH = client.layer_call(0, x_TH, ids_TK, scores_TK, None)
        descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()

        def call() -> None:
            while not over.wait(0.005):
                try:
                    out_TH = client.layer_call(0, x_TH, ids_TK, scores_TK, None)
                except EaasError as error:
                    failures.append(error)
                    return
                if not torch.allclose(out_TH, expected_TH, rtol=1e-4, atol=1e-5):
                    wrong.append(out_TH)

        calling = threading.Thread(target=call)
        calling.start()
        try:
            for _ in range(ROUNDS):
                victim = f"expert-server-{dice.randrange(cluster.servers)}"
                for _ in range(dice.choice((1, 1, 2))):
                    os.kill(cluster.children[victim].pid, signal.SIGKILL)
                    until(lambda name=victim: not cluster.children[name].running, "it lives")
                    cluster.restart(victim)
                    # It serves, and the client may be anywhere on its way there.
                    time.sleep(dice.choice((0.0, 0.02, 0.3)))
                until(lambda: usable() == cluster.servers, f"{victim} is not connected again")
        finally:
            over.set()
            calling.join()
        assert not failures
        assert not wrong
        lives = [c.incarnation for c in client.view().connections if c is not None]
        present = client.session.view.members
        assert lives == [present[name].incarnation for name in client.view().placement.servers]
        # Nothing of the former connections is left.
        until(lambda: threading.active_count() <= threads, "threads of lost connections")
        until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors, "their descriptors")
