"""Tokens and logits through a cluster equal those of transformers' `eager` on the same checkpoint."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import attention_client
from eaas.config import AttentionClientConfig
from eaas.one_sided import why_not
from eaas_cli.local import LocalCluster

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

NIXL = pytest.param("nixl", marks=pytest.mark.skipif(bool(why_not()), reason=why_not()))
TRANSPORTS = ("shm", pytest.param("grpc", marks=pytest.mark.nightly), NIXL)
NEW_TOKENS = 24


@functools.lru_cache(maxsize=1)
def eager(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, experts_implementation="eager").eval()


def ragged(batch: int, longest: int = 17) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded prompts of different lengths, with their mask."""
    generator = torch.Generator().manual_seed(batch)
    ids_BT = torch.zeros(batch, longest, dtype=torch.int64)
    mask_BT = torch.zeros_like(ids_BT)
    for row in range(batch):
        length = 1 + (7 * row + 4) % longest
        ids_BT[row, -length:] = torch.randint(20, 250, (length,), generator=generator)
        mask_BT[row, -length:] = 1
    return ids_BT, mask_BT


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tokens_and_logits(served: tuple[Path, LocalCluster], transport: str) -> None:
    path, cluster = served
    expected = eager(path)
    model = attention_client.load(
        path, cluster.monitor_address, config=AttentionClientConfig(transport=transport)
    )
    for batch in (1, 8):
        ids_BT, mask_BT = ragged(batch)
        options = {"attention_mask": mask_BT, "max_new_tokens": NEW_TOKENS, "do_sample": False}
        assert torch.equal(model.generate(ids_BT, **options), expected.generate(ids_BT, **options))
        with torch.no_grad():
            difference = (
                model(ids_BT, attention_mask=mask_BT).logits
                - expected(ids_BT, attention_mask=mask_BT).logits
            )
        assert difference.abs().max() < 1e-4


@pytest.mark.parametrize(
    "served",
    [
        pytest.param(arch, marks=[pytest.mark.nightly] * (arch not in ("qwen3_moe", "gpt_oss")))
        for arch in ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss")
    ],
    indirect=True,
)
def test_ended_rows_are_not_dispatched(served: tuple[Path, LocalCluster]) -> None:
    """Ended rows are fed placeholders: same tokens, fewer dispatched pairs."""
    path, cluster = served
    expected = eager(path)
    # A long timeout: pairs that a busy machine made the client send again would be counted twice.
    patient = AttentionClientConfig(attempt_timeout_s=8.0)
    model = attention_client.load(path, cluster.monitor_address, config=patient)
    joined = next(m._eaas_cluster for m in model.modules() if hasattr(m, "_eaas_cluster"))
    ids_BT, mask_BT = ragged(8)
    options = {"attention_mask": mask_BT, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    free = expected.generate(ids_BT, **options, eos_token_id=None)
    # A token that some rows generate early and others late or never.
    ends = free[0, ids_BT.shape[1] + 3].item()
    options |= {"eos_token_id": ends, "pad_token_id": 0}

    def pairs() -> float:
        return joined.metrics.registry.get_sample_value("eaas_dispatched_pairs_total") or 0.0

    before = pairs()
    tokens = model.generate(ids_BT, **options)
    assert torch.equal(tokens, expected.generate(ids_BT, **options))
    sent = pairs() - before
    layers, top_k = joined.shape.num_layers, joined.shape.top_k
    # The last token is never fed back; the placeholders of an ended row need no expert.
    answers = tokens[:, ids_BT.shape[1] :]
    ended_BT = torch.cumsum(answers == ends, dim=1) - (answers == ends).long() > 0
    live = int((~ended_BT[:, :-1] & (answers[:, :-1] != ends)).sum())
    assert sent == (int(mask_BT.sum()) + live) * layers * top_k
