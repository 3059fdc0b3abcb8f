"""An expert server with kernel `triton`, in Triton's interpreter, beside one with the CPU's kernel.

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
from eaas.net.grpc_client import channel
from eaas.rpc.v1 import expert_pb2, expert_pb2_grpc
from eaas_cli.local import LocalCluster
from interpreted_triton import needs_triton
from waiting import eventually

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), needs_triton]

NEW_TOKENS = 6
# Relative error of logits in float32, as against transformers' `eager`.
BOUND = 1e-4
CPU, GPU = "expert-server-0", "expert-server-1"
# The interpreter takes a tenth of a second for a call.
PATIENT = AttentionClientConfig(attempt_timeout_s=10, layer_timeout_s=60, hedge_share=0)


def kill(cluster: LocalCluster, name: str) -> None:
    os.kill(cluster.children[name].pid, signal.SIGKILL)


def restart(cluster: LocalCluster, model: PreTrainedModel, name: str, kernel: str) -> None:
    """Start a killed server again, with this kernel."""
    child = cluster.children[name]
    words = list(child.arguments)
    words[words.index("--kernel") + 1] = kernel
    child.arguments = tuple(words)
    cluster.restart(name)
    joined = cluster_of(model)
    eventually(lambda: joined.view().usable_S().sum() == 2, what="the reconnection")


def tokens_of(cluster: LocalCluster, name: str) -> int:
    """Rows that a server has computed so far."""
    address = cluster.children[name].address
    assert address is not None
    with channel(address) as line:
        stub = expert_pb2_grpc.ExpertServiceStub(line)
        answer = stub.ReadHotness(expert_pb2.ReadHotnessRequest(), timeout=10)
    return sum(sum(layer.tokens) for layer in answer.layers)


def test_side_by_side_with_a_cpu_server_and_after_kills(
    start_cluster: Callable[..., LocalCluster],
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    path = checkpoint("qwen3_moe")
    cluster = start_cluster(path, servers=2, redundancy=2, attention_client=False)
    model = attention_client.load(path, cluster.monitor_address, config=PATIENT)
    inputs = prompts(2)
    with torch.no_grad():
        exact = eager(path)(**inputs).logits
    expected_BT = generate(model, inputs, NEW_TOKENS)
    assert torch.equal(expected_BT, generate(eager(path), inputs, NEW_TOKENS))

    def check(when: str) -> None:
        with torch.no_grad():
            logits = model(**inputs).logits
        assert float((logits - exact).norm() / exact.norm()) < BOUND, when
        assert torch.equal(generate(model, inputs, NEW_TOKENS), expected_BT), when

    kill(cluster, GPU)
    restart(cluster, model, GPU, "triton")
    assert cluster.children[GPU].kernel == "triton (float32, interpreted)"
    assert str(cluster.children[CPU].kernel).startswith("native")
    check("side by side")
    assert all(tokens_of(cluster, name) > 0 for name in (CPU, GPU))

    kill(cluster, CPU)
    check("with kernel triton alone")

    restart(cluster, model, CPU, "auto")
    timer = threading.Timer(0.05, kill, (cluster, GPU))
    timer.start()
    check("while it is killed")
    timer.join()
    check("with the CPU's kernel alone")
