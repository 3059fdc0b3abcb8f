"""Expert servers on GPUs that Triton's interpreter stands in for, also beside one on the CPU, and kills.

The kernels round differently, so logits are compared within a bound. Greedy tokens of a float32 model are
equal.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import attention_client
from decoding import cluster_of, eager, generate, prompts
from eaas.config import AttentionClientConfig
from eaas_cli.local import LocalCluster
from interpreted_triton import needs_triton
from server_tokens import tokens_LE
from waiting import eventually

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), needs_triton]

# One of a prefill, one of a decode.
NEW_TOKENS = 2
# Relative error of logits in float32, as against transformers' `eager`.
BOUND = 1e-4
FIRST, SECOND = SERVERS = "expert-server-0", "expert-server-1"
# The interpreter takes a tenth of a second for a call.
PATIENT = AttentionClientConfig(attempt_timeout_s=10, layer_timeout_s=60, hedge_share=0)


def kill(cluster: LocalCluster, name: str) -> None:
    os.kill(cluster.children[name].pid, signal.SIGKILL)


def restart(cluster: LocalCluster, model: PreTrainedModel, name: str, device: str) -> None:
    """Start a killed server again, on this device."""
    child = cluster.children[name]
    words = list(child.arguments)
    words[words.index("--device") + 1] = device
    child.arguments = tuple(words)
    cluster.restart(name)
    joined = cluster_of(model)
    eventually(lambda: joined.view().usable_S().sum() == 2, what="the reconnection")


def tokens_of(cluster: LocalCluster, name: str) -> int:
    """Rows that a server has computed so far."""
    address = cluster.children[name].address
    assert address is not None
    return int(tokens_LE(address).sum())


def test_two_gpus_a_cpu_beside_one_and_kills(
    start_cluster: Callable[..., LocalCluster],
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    path = checkpoint("qwen3_moe")
    cluster = start_cluster(path, servers=2, redundancy=2, clients=0, devices=("cuda:0", "cuda:1"))
    model = attention_client.load(path, cluster.monitor_address, config=PATIENT)
    inputs = prompts(2)
    with torch.no_grad():
        exact = eager(path)(**inputs).logits
    expected_BT = generate(eager(path), inputs, NEW_TOKENS)

    def check(when: str) -> None:
        with torch.no_grad():
            logits = model(**inputs).logits
        assert float((logits - exact).norm() / exact.norm()) < BOUND, when

    def check_tokens(when: str) -> None:
        check(when)
        assert torch.equal(generate(model, inputs, NEW_TOKENS), expected_BT), when

    check("on two GPUs")
    assert all(cluster.children[name].kernel == "triton (float32, interpreted)" for name in SERVERS)
    assert all(tokens_of(cluster, name) > 0 for name in SERVERS)

    timer = threading.Timer(0.2, kill, (cluster, FIRST))
    timer.start()
    check_tokens("while one is killed")
    timer.join()

    # Its experts are loaded again.
    restart(cluster, model, FIRST, "cuda:0")
    kill(cluster, SECOND)
    check("with the other one alone")

    restart(cluster, model, SECOND, "cpu")
    assert str(cluster.children[SECOND].kernel).startswith("native")
    check_tokens("with a CPU beside a GPU")
    assert tokens_of(cluster, SECOND) > 0

    kill(cluster, FIRST)
    check_tokens("with the CPU alone")
