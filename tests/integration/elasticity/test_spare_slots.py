"""Tokens with spare slots equal transformers', while other prompts make other experts hot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import attention_client
from decoding import cluster_of, eager, generate
from eaas.config import AttentionClientConfig
from eaas.spares import SpareReplicas
from eaas_cli.local import LocalCluster

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
NEW_TOKENS, ROUNDS = 4, 60


def prompts(token: int) -> dict[str, torch.Tensor]:
    """Prompts of few different tokens: their experts are hot."""
    dice = torch.Generator().manual_seed(token)
    ids_BT = token + torch.randint(2, (4, 150), generator=dice)
    return {"input_ids": ids_BT, "attention_mask": torch.ones_like(ids_BT)}


def test_tokens_are_those_of_transformers(
    start_cluster: Callable[..., LocalCluster],
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EAAS_BALANCER__SPARE_SLOTS", "true")
    monkeypatch.setenv("EAAS_BALANCER__STEP_S", "0.2")
    path = checkpoint("qwen3_moe")
    cluster = start_cluster(path, servers=4, redundancy=1, clients=0)
    model = attention_client.load(
        path, cluster.monitor_address, config=AttentionClientConfig(layer_timeout_s=30.0)
    )
    client = cluster_of(model)
    seen: list[SpareReplicas] = []
    for token in (40, 90):
        inputs = prompts(token)
        expected_BT = generate(eager(path), inputs, NEW_TOKENS)
        before = client.view().spares
        for _ in range(ROUNDS):
            assert torch.equal(generate(model, inputs, NEW_TOKENS), expected_BT)
            if client.view().spares not in (before, *seen):
                seen.append(client.view().spares)
                break
        else:
            pytest.fail(f"{ROUNDS} rounds changed no spare replica; seen: {seen}")
        for _ in range(3):
            assert torch.equal(generate(model, inputs, NEW_TOKENS), expected_BT)
    assert client.placement is not None
    assert client.placement.epoch == 1
