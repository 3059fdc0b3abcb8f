"""Two alternating micro-batches over a cluster: the same tokens, also when servers are killed."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
from transformers import PreTrainedModel

import attention_client
from decoding import cluster_of, eager, generate, ragged
from eaas.config import AttentionClientConfig
from eaas.errors import ExpertsUnavailableError
from eaas_cli.local import LocalCluster
from waiting import eventually

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

NEW_TOKENS = 24
KILLS = int(os.environ.get("KILL_MOMENTS", "2"))


def load(
    path: Path, cluster: LocalCluster, overlap: Literal["auto", "on", "off"], **settings: object
) -> tuple[PreTrainedModel, attention_client.Cluster]:
    config = AttentionClientConfig(overlap=overlap, **settings)
    model = attention_client.load(path, cluster.monitor_address, config=config)
    return model, cluster_of(model)


def answer(model: PreTrainedModel) -> torch.Tensor:
    return generate(model, ragged(8), NEW_TOKENS)


def slots_in_use(joined: attention_client.Cluster) -> int:
    return sum(c.in_flight for c in joined.view().connections if c is not None)


def test_tokens_and_kills(
    checkpoint: Callable[..., Path], start_cluster: Callable[..., LocalCluster]
) -> None:
    """Servers are killed while both micro-batches have requests in flight."""
    path = checkpoint("qwen3_moe")
    cluster = start_cluster(path, clients=0)
    model, joined = load(path, cluster, "on")
    expected = answer(eager(path))
    started = time.monotonic()
    assert torch.equal(answer(model), expected)
    usual_s = time.monotonic() - started
    dice = random.Random(3)
    for _ in range(KILLS):
        victim = f"expert-server-{dice.randrange(cluster.servers)}"
        pid = cluster.children[victim].pid
        blow = threading.Timer(dice.uniform(0, usual_s), os.kill, (pid, signal.SIGKILL))
        blow.start()
        assert torch.equal(answer(model), expected), f"{victim} killed"
        blow.join()
        cluster.restart(victim)
        eventually(lambda: joined.view().usable_S().sum() == cluster.servers)
    passes = joined.metrics.registry.get_sample_value
    assert passes("eaas_forward_passes_total", {"batch": "overlap"}) >= (1 + KILLS) * NEW_TOKENS
    assert not passes("eaas_forward_passes_total", {"batch": "whole"})


def test_no_replica_left(
    checkpoint: Callable[..., Path], start_cluster: Callable[..., LocalCluster]
) -> None:
    """One error ends both micro-batches, and no slot stays in use."""
    path = checkpoint("qwen3_moe")
    cluster = start_cluster(path, clients=0, servers=2, redundancy=1)
    model, joined = load(path, cluster, "on", layer_timeout_s=1.0)
    expected = answer(model)
    os.kill(cluster.children["expert-server-1"].pid, signal.SIGKILL)
    with pytest.raises(ExpertsUnavailableError, match="no live replica of expert"):
        answer(model)
    cluster.restart("expert-server-1")
    joined.wait_until_covered(30.0)
    assert torch.equal(answer(model), expected), "it goes on when the server is back"
    assert slots_in_use(joined) == 0
