"""Killing an expert server changes no token and adds little latency."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import attention_client
from attention_client.connections.connection import Connection
from attention_client.connections.messages import Ticket
from attention_client.exchange import Exchange
from decoding import cluster_of, eager, generate, prompts
from eaas.config import AttentionClientConfig
from eaas.one_sided import why_not
from eaas_cli.local import LocalCluster
from waiting import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

ADDED_LATENCY_S = 0.25
NO_NIXL = pytest.mark.skipif(bool(why_not()), reason=why_not())
NIXL = pytest.param("nixl", marks=NO_NIXL)
TRANSPORTS = ("shm", "grpc", NIXL)
# Failover does not depend on the model's layers (test_equals_eager has all architectures without kills), so
# `make test` kills servers under one architecture. KILL_MOMENTS is the number of kills for each case.
MOMENTS = int(os.environ.get("KILL_MOMENTS", "2"))
ARCHITECTURES = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss")
CASES = [
    pytest.param(
        architecture,
        transport,
        marks=[NO_NIXL] * (transport == "nixl")
        + [pytest.mark.nightly] * (architecture != ARCHITECTURES[0]),
    )
    for architecture in ARCHITECTURES
    for transport in ("shm", "grpc", "nixl")
]


def kill(cluster: LocalCluster, name: str) -> None:
    os.kill(cluster.children[name].pid, signal.SIGKILL)


def answer(model: PreTrainedModel) -> torch.Tensor:
    return generate(model, prompts(4), tokens=40)


@pytest.mark.parametrize(("served", "transport"), CASES, indirect=["served"])
def test_any_server_at_any_moment(served: tuple[Path, LocalCluster], transport: str) -> None:
    path, cluster = served
    expected = answer(eager(path))
    model = attention_client.load(
        path, cluster.monitor_address, config=AttentionClientConfig(transport=transport)
    )
    started = time.monotonic()
    assert torch.equal(answer(model), expected)
    usual_s = time.monotonic() - started
    dice = random.Random(f"{path.name} {transport}")
    for _ in range(MOMENTS):
        victim = f"expert-server-{dice.randrange(cluster.servers)}"
        timer = threading.Timer(dice.uniform(0, usual_s), kill, (cluster, victim))
        timer.start()
        tokens = answer(model)
        timer.join()
        assert torch.equal(tokens, expected), f"{victim} killed"
        assert torch.equal(answer(model), expected), "with one server fewer"
        cluster.restart(victim)
        wait_connected(model, cluster.servers)
        assert torch.equal(answer(model), expected), "with the server back"


def wait_connected(model: PreTrainedModel, servers: int) -> None:
    joined = cluster_of(model)
    eventually(lambda: joined.view().usable_S().sum() == servers, what="the reconnection")


@pytest.mark.alone
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    "blow", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.nightly)]
)
def test_latency_of_the_call_that_met_it(
    checkpoint: Callable[..., Path],
    start_cluster: Callable[..., LocalCluster],
    transport: str,
    blow: signal.Signals,
) -> None:
    """Without the monitor, which is stopped. A stopped server neither answers nor closes its connections."""
    path = checkpoint("qwen3_moe")
    cluster = start_cluster(path, clients=0, redundancy=2)
    model = attention_client.load(
        path, cluster.monitor_address, config=AttentionClientConfig(transport=transport)
    )
    joined = cluster_of(model)
    took_s: list[float] = []
    plain = joined.layer_call

    def timed(*arguments: object) -> torch.Tensor:
        started = time.monotonic()
        try:
            return plain(*arguments)
        finally:
            took_s.append(time.monotonic() - started)

    joined.layer_call = timed  # type: ignore[method-assign]
    expected = answer(model)
    base_s = sorted(took_s)[len(took_s) // 2]
    os.kill(cluster.children["monitor"].pid, signal.SIGSTOP)
    took_s.clear()
    struck = strike_server_of_request(joined, cluster, blow, request=20)
    assert torch.equal(answer(model), expected)
    assert struck
    assert failovers(joined) > 0, "no call met the struck server"
    assert max(took_s) - base_s < ADDED_LATENCY_S
    # Otherwise the servers would wait for the monitor when they end.
    os.kill(cluster.children["monitor"].pid, signal.SIGCONT)
    del model


def strike_server_of_request(
    joined: attention_client.Cluster, cluster: LocalCluster, blow: signal.Signals, request: int
) -> list[str]:
    """Send a signal to the server of the n-th request from now on, at the moment of that request.

    A server chosen in advance might get no request: two of the three servers hold every expert.

    Returns:
        A list that will hold the server's name.
    """
    struck: list[str] = []
    countdown = iter(range(request - 1, -1, -1))

    def count(connection: Connection) -> None:
        if next(countdown, None) == 0:
            struck.append(connection.server_id)
            os.kill(cluster.children[connection.server_id].pid, blow)

    def watch(connection: Connection) -> None:
        plain = connection.submit

        def submit(*arguments: Any) -> Ticket:
            ticket = plain(*arguments)
            count(connection)
            return ticket

        connection.submit = submit  # type: ignore[method-assign]

    connections = [c for c in joined.view().connections if c is not None]
    for connection in connections:
        watch(connection)
    calls = joined._calls
    started = calls._started

    def count_started(view: Any, route: Any, exchange: Exchange | None) -> None:
        started(view, route, exchange)
        if exchange is not None:
            count(next(c for c in connections if c.slots.users))

    calls._started = count_started  # type: ignore[method-assign]
    return struck


def failovers(joined: attention_client.Cluster) -> float:
    read = joined.metrics.registry.get_sample_value
    hedged = read("eaas_hedges_total", {"outcome": "won"}) or 0.0
    failed = sum(
        read("eaas_failovers_total", {"reason": reason}) or 0.0
        for reason in ("lost", "timeout", "refused", "corrupt")
    )
    return hedged + failed or float(joined.view().usable_S().sum() < 3)
