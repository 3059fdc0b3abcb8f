"""Killing an expert server is a non-event: same tokens, and hardly a pause."""

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
from transformers import AutoModelForCausalLM, PreTrainedModel

import attention_client
from attention_client.connection import Connection
from attention_client.messages import Ticket
from eaas.config import AttentionClientConfig
from eaas.errors import ExpertsUnavailableError
from eaas.local import LocalCluster
from eaas.one_sided import why_not

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

ADDED_LATENCY_S = 0.25
NO_NIXL = pytest.mark.skipif(bool(why_not()), reason=why_not())
NIXL = pytest.param("nixl", marks=NO_NIXL)
TRANSPORTS = ("shm", "grpc", NIXL)
# (architecture, transport, kills). What a server's end does to a transport has nothing to do with the layers
# of the model (tests/integration/test_equals_eager.py has all pairs without kills): one architecture meets
# each transport, the others take turns. KILL_MOMENTS=10 make test: 10 for each architecture and transport.
KILLS = (
    ("qwen3_moe", "shm", 5),
    ("qwen3_moe", "grpc", 5),
    ("qwen3_moe", "nixl", 5),
    ("qwen2_moe", "shm", 1),
    ("mixtral", "grpc", 1),
    ("olmoe", "nixl", 1),
    ("olmoe", "grpc", 1),
    ("deepseek_v3", "shm", 1),
    ("gpt_oss", "grpc", 1),
)
if "KILL_MOMENTS" in os.environ:
    KILLS = tuple(
        (architecture, transport, int(os.environ["KILL_MOMENTS"]))
        for architecture in dict.fromkeys(architecture for architecture, _, _ in KILLS)
        for transport in ("shm", "grpc", "nixl")
    )


def prompts(batch: int) -> dict[str, torch.Tensor]:
    ids_BT = torch.randint(20, 250, (batch, 12), generator=torch.Generator().manual_seed(5))
    return {"input_ids": ids_BT, "attention_mask": torch.ones_like(ids_BT)}


def kill(cluster: LocalCluster, name: str) -> None:
    os.kill(cluster.children[name].pid, signal.SIGKILL)


def generate(model: PreTrainedModel, batch: int) -> torch.Tensor:
    return model.generate(**prompts(batch), max_new_tokens=40, do_sample=False)


@pytest.mark.parametrize(
    ("served", "transport", "moments"),
    [pytest.param(*case, marks=NO_NIXL if case[1] == "nixl" else ()) for case in KILLS],
    indirect=["served"],
)
def test_any_server_at_any_moment(
    served: tuple[Path, LocalCluster], transport: str, moments: int
) -> None:
    path, cluster = served
    batch = 4
    expected = generate(
        AutoModelForCausalLM.from_pretrained(path, experts_implementation="eager").eval(), batch
    )
    model = attention_client.load(
        path, cluster.monitor_address, config=AttentionClientConfig(transport=transport)
    )
    started = time.monotonic()
    assert torch.equal(generate(model, batch), expected)
    usual_s = time.monotonic() - started
    dice = random.Random(f"{path.name} {transport}")
    for _ in range(moments):
        victim = f"expert-server-{dice.randrange(cluster.servers)}"
        timer = threading.Timer(dice.uniform(0, usual_s), kill, (cluster, victim))
        timer.start()
        tokens = generate(model, batch)
        timer.join()
        assert torch.equal(tokens, expected), f"{victim} killed"
        assert torch.equal(generate(model, batch), expected), "with one server fewer"
        cluster.restart(victim)
        wait_connected(model, cluster.servers)
        assert torch.equal(generate(model, batch), expected), "with the server back"


def wait_connected(model: PreTrainedModel, servers: int) -> None:
    joined = cluster_of(model)
    deadline = time.monotonic() + 30
    while joined.view().usable_S().sum() < servers:
        assert time.monotonic() < deadline, "the returned server is not connected"
        time.sleep(0.05)


def cluster_of(model: PreTrainedModel) -> attention_client.Cluster:
    return next(m._eaas_cluster for m in model.modules() if hasattr(m, "_eaas_cluster"))


@pytest.mark.alone
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_latency_of_the_call_that_met_it(
    checkpoint: Callable[..., Path],
    start_cluster: Callable[..., LocalCluster],
    transport: str,
    blow: signal.Signals,
) -> None:
    """By the client alone: the monitor is stopped. A stopped server answers nothing and closes nothing."""
    path = checkpoint("qwen3_moe")
    cluster = start_cluster(path, attention_client=False, redundancy=2)
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
    expected = generate(model, 4)
    base_s = sorted(took_s)[len(took_s) // 2]
    os.kill(cluster.children["monitor"].pid, signal.SIGSTOP)
    took_s.clear()
    struck = strike_whoever_is_asked(joined, cluster, blow, request=20)
    assert torch.equal(generate(model, 4), expected)
    assert struck
    assert failovers(joined) > 0, "the call did not meet it"
    assert max(took_s) - base_s < ADDED_LATENCY_S
    # Servers that end would wait for it in vain.
    os.kill(cluster.children["monitor"].pid, signal.SIGCONT)
    del model


def strike_whoever_is_asked(
    joined: attention_client.Cluster, cluster: LocalCluster, blow: signal.Signals, request: int
) -> list[str]:
    """The server that is sent the n-th request from now on gets a signal at that moment.

    A server chosen beforehand may be one that nothing is sent to: two of three hold every expert.

    Returns:
        A list that will hold the server's name.
    """
    struck: list[str] = []
    countdown = iter(range(request - 1, -1, -1))

    def watch(connection: Connection) -> None:
        plain = connection.submit

        def submit(*arguments: Any) -> Ticket:
            ticket = plain(*arguments)
            if next(countdown, None) == 0:
                struck.append(connection.server_id)
                os.kill(cluster.children[connection.server_id].pid, blow)
            return ticket

        connection.submit = submit  # type: ignore[method-assign]

    for connection in joined.view().connections:
        assert connection is not None
        watch(connection)
    return struck


def failovers(joined: attention_client.Cluster) -> float:
    read = joined.metrics.registry.get_sample_value
    hedged = read("eaas_hedges_total", {"outcome": "won"}) or 0.0
    failed = sum(
        read("eaas_failovers_total", {"reason": reason}) or 0.0
        for reason in ("lost", "timeout", "refused", "corrupt")
    )
    return hedged + failed or float(joined.view().usable_S().sum() < 3)


def test_no_replica_left_is_a_typed_error(
    checkpoint: Callable[..., Path], start_cluster: Callable[..., LocalCluster]
) -> None:
    path = checkpoint("qwen3_moe")
    cluster = start_cluster(path, attention_client=False, redundancy=1)
    model = attention_client.load(
        path,
        cluster.monitor_address,
        config=AttentionClientConfig(layer_timeout_s=1.0),
    )
    expected = generate(model, 2)
    kill(cluster, "expert-server-2")
    with pytest.raises(
        ExpertsUnavailableError, match=r"layer \d+: no live replica of expert"
    ) as caught:
        generate(model, 2)
    assert caught.value.experts
    cluster.restart("expert-server-2")
    wait_connected(model, cluster.servers)
    assert torch.equal(generate(model, 2), expected), "it goes on when the server is back"
