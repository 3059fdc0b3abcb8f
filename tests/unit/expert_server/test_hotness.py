"""Tokens per expert: each kernel counts them, and the handler reports them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional

from eaas.rpc.v1 import expert_pb2 as pb
from eaas.types import ModelShape
from expert_server.kernels import KernelSpec
from expert_server.kernels.choose import KERNELS
from expert_server.load_report.hotness import HotnessHandler, carried
from expert_server.weights.weights import ExpertForm, ExpertWeights

E, H, K, INNER = 8, 32, 3, 48
INTERFACES = """Inter-| Receive            | Transmit
 face |bytes packets and six more|bytes packets and so on
    lo: 9999 41 0 0 0 0 0 0 9999 41 0 0 0 0 0 0
  eth0:1000 7 0 0 0 0 0 0 300 5 0 0 0 0 0 0
  ib0: 50 1 0 0 0 0 0 0 7 1 0 0 0 0 0 0
"""
FORM = ExpertForm(False, False, functional.gelu)
SHAPE = ModelShape("tiny", E, H, K, ("l0", "l1"), "float32", "digest")


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_counts_its_experts_tokens(name: str) -> None:
    kernel = KERNELS[name]([FORM, FORM], KernelSpec(torch.float32))
    dice = torch.Generator().manual_seed(1)
    try:
        for layer in (0, 1):
            for expert in range(E - 1):
                weights = (
                    torch.randn(INNER, H, generator=dice),
                    torch.randn(H, INNER, generator=dice),
                )
                kernel.load(layer, expert, ExpertWeights(*weights))
        counts_LX = np.zeros((2, 1 + E), np.int64)
        kernel.count_into(counts_LX)
        expected_LX = np.zeros((2, 1 + E), np.int64)
        for tokens, layer in ((1, 0), (0, 0), (700, 1), (64, 0)):
            order_TE = torch.rand(tokens, E - 1, generator=dice).argsort(dim=1)
            ids_TK = order_TE[:, :K].to(torch.int32)
            ids_TK[::3, 1] = -1
            kernel(torch.randn(tokens, H, generator=dice), ids_TK, torch.ones(tokens, K), layer)
            for expert in range(E):
                count = int((ids_TK == expert).sum())
                expected_LX[layer, 1 + expert] += count
                expected_LX[layer, 0] += count > 0
        assert counts_LX.tolist() == expected_LX.tolist()
        with pytest.raises(LookupError):
            kernel(torch.ones(1, H), torch.tensor([[E - 1]]), torch.ones(1, 1), 1)
        assert counts_LX[1, E] == 0, "what is not held is not computed"
    finally:
        kernel.close()


def test_unchanged_totals_are_not_sent_again() -> None:
    loop = SimpleNamespace(requests=0, busy_s=0.0, batches=0)
    handler = HotnessHandler(SHAPE, loop, SimpleNamespace(expert_bytes=1000))

    def read(boot_id: int = 0, sequence: int = 0) -> pb.ReadHotnessResponse:
        return handler.ReadHotness(pb.ReadHotnessRequest(boot_id=boot_id, sequence=sequence), None)

    first = read()
    assert first.boot_id
    assert first.expert_bytes == 1000
    assert [list(layer.tokens) for layer in first.layers] == [[0] * E] * 2
    handler.counts_LX[1, 1 + 3] += 5
    handler.counts_LX[1, 0] += 1
    loop.requests, loop.busy_s, loop.batches = 1, 0.25, 1
    second = read(first.boot_id, first.sequence)
    assert second.layers[1].tokens[3] == 5
    assert (second.busy_s, second.batches, second.visits) == (0.25, 1, 1)
    assert second.boot_id == first.boot_id
    # Totals: an answer that was lost is in the next one, and one that came twice says the same.
    assert read(first.boot_id, first.sequence).layers == second.layers
    assert not read(second.boot_id, second.sequence).layers
    other = HotnessHandler(SHAPE, loop, SimpleNamespace(expert_bytes=0))
    answer = other.ReadHotness(pb.ReadHotnessRequest(boot_id=first.boot_id, sequence=1), None)
    assert answer.layers, "another process with the same sequence"
    assert answer.expert_bytes == 0


def test_carried_bytes_are_those_of_all_interfaces_but_the_loopback() -> None:
    assert carried(INTERFACES) == (1050, 307)
    assert carried("\n".join(INTERFACES.splitlines()[:3])) == (0, 0)
