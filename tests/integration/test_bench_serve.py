"""The baseline of `eaas bench serve`: the same model in a single process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eaas_cli.bench.baseline import LocalExperts, load_baseline
from eaas_cli.bench.load import Workload
from eaas_cli.bench.serve import bench_serve

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def test_the_kernels_compute_what_transformers_does(checkpoint: Callable[..., Path]) -> None:
    path = checkpoint("qwen3_moe")
    ours, description = load_baseline(path, "kernels", 1)
    theirs, implementation = load_baseline(path, "transformers", 1)
    assert implementation == "grouped_mm"
    assert description.split(" ")[0] in ("native", "reference")
    tokens = torch.arange(20, 60).view(2, 20)
    with torch.inference_mode():
        torch.testing.assert_close(
            ours(tokens).logits, theirs(tokens).logits, atol=1e-4, rtol=0, check_stride=False
        )
    # No weight is held twice.
    held = sum(parameter.numel() for parameter in ours.parameters())
    assert held < sum(parameter.numel() for parameter in theirs.parameters())


def test_unwanted_tokens_are_zero(checkpoint: Callable[..., Path]) -> None:
    experts = LocalExperts(checkpoint("qwen3_moe"), threads=1)
    x_TH = torch.randn(4, experts.checkpoint.shape.hidden_size)
    ids_TK, scores_TK = torch.tensor([[0, 1]] * 4), torch.full((4, 2), 0.5)
    wanted_T = torch.tensor([True, False, True, False])
    every_TH = experts.layer_call(0, x_TH, ids_TK, scores_TK, None)
    some_TH = experts.layer_call(0, x_TH, ids_TK, scores_TK, wanted_T)
    torch.testing.assert_close(some_TH[::2], every_TH[::2])
    assert not some_TH[1::2].any()
    # The caller owns the answer: the next call does not write into it.
    kept_TH = every_TH.clone()
    experts.layer_call(1, 2 * x_TH, ids_TK, scores_TK, None)
    assert torch.equal(every_TH, kept_TH)


@pytest.mark.nightly
@pytest.mark.parametrize("baseline", ["transformers", "kernels"])
def test_the_document_names_the_baseline(checkpoint: Callable[..., Path], baseline: str) -> None:
    document = bench_serve(
        checkpoint("qwen3_moe"),
        servers=1,
        redundancy=1,
        transport="shm",
        workload=Workload(requests=2, concurrency=2, prompt_tokens=4, output_tokens=4),
        rounds=1,
        baseline=baseline,
        say=lambda _line: None,
    )
    assert document["baseline"]["experts"] == baseline
    is_transformers = document["baseline"]["implementation"] == "grouped_mm"
    assert is_transformers == (baseline == "transformers")
    assert [row["entrant"] for row in document["rows"]] == ["cluster", "single process"]
    assert all(row["tokens_per_s"] > 0 for row in document["rows"])
    assert document["rows"][1]["ratio"] == 1.0
