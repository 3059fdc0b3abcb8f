"""Tokens and logits through a cluster equal those of transformers' `eager` on the same checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import attention_client
from decoding import cluster_of, eager, generate, ragged
from eaas.config import AttentionClientConfig
from eaas.one_sided import why_not
from eaas_cli.local import LocalCluster

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

NIXL = pytest.param("nixl", marks=pytest.mark.skipif(bool(why_not()), reason=why_not()))
TRANSPORTS = ("shm", pytest.param("grpc", marks=pytest.mark.nightly), NIXL)
NEW_TOKENS = 24


def served_as(*usual: str) -> list[Any]:
    """All architectures; the usual ones in every run (test_random_checkpoints.py has all in every run)."""
    names = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss")
    return [pytest.param(n, marks=[pytest.mark.nightly] * (n not in usual)) for n in names]


@pytest.mark.parametrize("served", served_as("qwen3_moe", "deepseek_v3", "gpt_oss"), indirect=True)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tokens_and_logits(served: tuple[Path, LocalCluster], transport: str) -> None:
    path, cluster = served
    expected = eager(path)
    model = attention_client.load(
        path, cluster.monitor_address, config=AttentionClientConfig(transport=transport)
    )
    for batch in (1, 8):
        inputs = ragged(batch)
        found_BT, expected_BT = (generate(m, inputs, NEW_TOKENS) for m in (model, expected))
        assert torch.equal(found_BT, expected_BT)
        with torch.no_grad():
            difference = model(**inputs).logits - expected(**inputs).logits
        assert difference.abs().max() < 1e-4


@pytest.mark.parametrize("served", served_as("qwen3_moe", "gpt_oss"), indirect=True)
def test_ended_rows_are_not_dispatched(served: tuple[Path, LocalCluster]) -> None:
    """Ended rows are fed placeholders: same tokens, fewer dispatched pairs."""
    path, cluster = served
    expected = eager(path)
    # A long timeout: pairs that a busy machine made the client send again would be counted twice.
    patient = AttentionClientConfig(attempt_timeout_s=8.0)
    model = attention_client.load(path, cluster.monitor_address, config=patient)
    joined = cluster_of(model)
    inputs = ragged(8)
    length = inputs["input_ids"].shape[1]
    free_BT = generate(expected, inputs, NEW_TOKENS, eos_token_id=None)
    # A token that some rows generate early and others late or never.
    ends = free_BT[0, length + 3].item()
    options = {"eos_token_id": ends, "pad_token_id": 0}

    def pairs() -> float:
        return joined.metrics.registry.get_sample_value("eaas_dispatched_pairs_total") or 0.0

    before = pairs()
    tokens_BT = generate(model, inputs, NEW_TOKENS, **options)
    assert torch.equal(tokens_BT, generate(expected, inputs, NEW_TOKENS, **options))
    sent = pairs() - before
    layers, top_k = joined.shape.num_layers, joined.shape.top_k
    # The last token is never fed back; the placeholders of an ended row need no expert.
    answers_BT = tokens_BT[:, length:]
    ended_BT = torch.cumsum(answers_BT == ends, dim=1) - (answers_BT == ends).long() > 0
    live = int((~ended_BT[:, :-1] & (answers_BT[:, :-1] != ends)).sum())
    assert sent == (int(inputs["attention_mask"].sum()) + live) * layers * top_k
