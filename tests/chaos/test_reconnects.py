"""Servers are killed and restarted repeatedly under one client: it reconnects each time."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from chaos_world import ChaosWorld
from eaas_cli.local import LocalCluster
from waiting import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

ROUNDS = int(os.environ.get("KILL_MOMENTS", "3"))


@pytest.mark.parametrize("transport", ["shm", pytest.param("grpc", marks=pytest.mark.nightly)])
def test_a_server_that_returns_is_connected_to_each_time(
    checkpoint: Callable[..., Path],
    start_cluster: Callable[..., LocalCluster],
    transport: str,
    chaos: ChaosWorld,
) -> None:
    """Also if it is killed again before, while or just after the client connects to it."""
    cluster = start_cluster(checkpoint(), clients=0)
    client = chaos.join(cluster, cluster.servers, transport=transport)
    client.layer()
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    dice = random.Random(5)
    with chaos.calling(client):
        for _ in range(ROUNDS):
            victim = f"expert-server-{dice.randrange(cluster.servers)}"
            for _ in range(dice.choice((1, 1, 2))):
                os.kill(cluster.children[victim].pid, signal.SIGKILL)
                eventually(lambda name=victim: not cluster.children[name].running, what="its end")
                cluster.restart(victim)
                # The server serves; the client may not be connected yet.
                time.sleep(dice.choice((0.0, 0.02, 0.3)))
            client.wait(cluster.servers)
    view, present = client.cluster.view(), client.cluster.session.view.members
    connected = [c.incarnation for c in view.connections if c is not None]
    assert connected == [present[name].incarnation for name in view.placement.servers]
    # Nothing is left of the former connections.
    eventually(lambda: threading.active_count() <= threads, what="the end of their threads")
    eventually(
        lambda: len(os.listdir("/proc/self/fd")) <= descriptors, what="closing of their files"
    )
