"""Hidden states between a GPU and the host; skipped without one."""

from __future__ import annotations

import random

import pytest
import torch

from attention_client.engines.staging import Staged, Staging

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

HIDDEN, TOP_K, EXPERTS = 512, 4, 32


def inputs(tokens: int, seed: int) -> tuple[torch.Tensor, ...]:
    """The tensors of a layer call on the GPU, with the results of queued kernels."""
    rng = torch.Generator("cuda").manual_seed(seed)
    x_TH = torch.randn(tokens, HIDDEN, device="cuda", generator=rng)
    for _ in range(20):
        x_TH = (x_TH @ torch.eye(HIDDEN, device="cuda")).add(0.0)
    ids_TK = torch.randint(EXPERTS, (tokens, TOP_K), device="cuda", generator=rng)
    scores_TK = torch.rand(tokens, TOP_K, device="cuda", generator=rng)
    padding_T = torch.arange(tokens, device="cuda") >= tokens - 1
    return x_TH.bfloat16(), ids_TK, scores_TK, padding_T


def test_copies_are_whole_while_calls_overlap() -> None:
    """Calls that overlap on one stream keep their memory apart, with results still on their way back."""
    staging, rng = Staging(), random.Random(0)
    flying: list[tuple[Staged, tuple[torch.Tensor, ...]]] = []
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    for seed in range(300):
        tensors = inputs(rng.choice([1, 7, 64, 200]), seed)
        flying.append((staging.to_host(*tensors), tensors))
        while flying and rng.random() < 0.6:
            staged, own = flying.pop(rng.randrange(len(flying)))
            for host, device in zip(staged.tensors, own, strict=True):
                assert host.is_cpu
                assert torch.equal(host, device.cpu())
            out_TH = staged.tensors[0].float().mul(2).bfloat16()
            wanted_TH = out_TH.clone()
            result_TH = staged.to_device(out_TH)
            # The caller may reuse its tensor at once.
            out_TH.zero_()
            assert result_TH.is_cuda
            results.append((result_TH, wanted_TH))
        if len(flying) > 8:
            flying.pop(0)[0].drop()
    for result_TH, wanted_TH in results:
        assert torch.equal(result_TH.cpu(), wanted_TH)
    assert len(results) > 50


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_host_waits_once_for_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all tensors of a call at once; the event of the result before is over by then."""
    waits: list[int] = []
    synchronize = torch.cuda.Event.synchronize

    def count(event: torch.cuda.Event) -> None:
        waits.append(1)
        synchronize(event)

    monkeypatch.setattr(torch.cuda.Event, "synchronize", count)
    staging, tensors = Staging(), inputs(200, 0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for before_sending in (1, 2):
            staged = staging.to_host(*tensors)
            assert sum(waits) == before_sending
            staged.to_device(staged.tensors[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum(waits) == 3
