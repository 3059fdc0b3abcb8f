"""The persistent kernel with slots of its own, and a client of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from eaas.wire import Arena
from eaas.wire.header import (
    RequestHeader,
    ResultHeader,
    SlotState,
    WireDtype,
    payload_layout,
    result_length,
)
from eaas.wire.slot import request_views, result_view
from expert_layers import batch
from expert_server.kernels import KernelSpec
from expert_server.kernels.activation import Activation, recognise
from expert_server.kernels.gpu.device import Device, Interpreter
from expert_server.kernels.gpu.packing import DeviceExpert, pack_expert
from expert_server.kernels.gpu.persistent import PersistentKernel, Sizes
from expert_server.kernels.gpu.uploads import Uploads
from expert_server.weights.weights import ExpertForm, ExpertWeights

__all__ = ["EXPERTS", "LAYERS", "MOST_PAIRS", "TOP_K", "Served", "made", "pack", "random_batch"]

LAYERS, EXPERTS, TOP_K, MOST_PAIRS, SLOTS = 2, 5, 3, 24, 2


@dataclass
class Served:
    """A persistent kernel that runs on threads, and a client of its slots."""

    arena: Arena
    kernel: PersistentKernel
    hidden: int

    def header(self, tokens: int, **changes: Any) -> RequestHeader:
        return RequestHeader.of(
            dtype=WireDtype.BFLOAT16,
            generation=7,
            request_id=11,
            epoch=1,
            budget_us=1000,
            layer=1,
            batch_size=tokens,
            hidden_size=self.hidden,
            top_k=TOP_K,
        )._replace(**changes)

    def ask(
        self,
        header: RequestHeader,
        one: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        slot: int = 0,
    ) -> tuple[ResultHeader, torch.Tensor]:
        x_TH, ids_TK, scores_TK = one
        arena = self.arena
        offset = arena.request_offset(slot)
        well_formed = self.header(len(x_TH))
        x, ids, scores = request_views(arena.buffer, offset, well_formed)
        x[:], ids[:], scores[:] = x_TH.view(torch.uint16).numpy(), ids_TK.numpy(), scores_TK.numpy()
        header.pack_into(arena.buffer, offset)
        assert arena.client_write_done(slot)
        deadline = time.monotonic() + 20
        while arena.flags.load(slot) != SlotState.DONE:
            assert time.monotonic() < deadline
            time.sleep(0)
        answer = ResultHeader.unpack_from(arena.buffer, arena.result_offset(slot))
        rows = result_view(arena.buffer, arena.result_offset(slot), len(x_TH), self.hidden)
        result_TH = torch.from_numpy(rows.copy())
        assert arena.client_free(slot)
        return answer, result_TH


def pack(
    weights: ExpertWeights,
    form: ExpertForm,
    device: Device | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> DeviceExpert:
    """Pack an expert as kernel `triton` does."""
    plain, spec = weights.plain(form), KernelSpec(dtype)
    uploads = Uploads(device or Interpreter())
    return pack_expert(plain, activation_of(form), spec, uploads, lambda: None)


def activation_of(form: ExpertForm) -> Activation:
    activation = recognise(form)
    assert activation is not None
    return activation


def made(
    form: ExpertForm,
    hidden: int,
    packed: DeviceExpert,
    device: Device | None = None,
    pin: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> Served:
    """Make a kernel for experts like the packed one, and its slots."""
    capacity = payload_layout(MOST_PAIRS // TOP_K, hidden, TOP_K, WireDtype.BFLOAT16).total
    result = result_length(MOST_PAIRS // TOP_K, hidden)
    arena = Arena.create_local(SLOTS, capacity, result, 1)
    kernel = PersistentKernel(
        arena,
        packed.layout,
        activation_of(form),
        Sizes(LAYERS, EXPERTS, MOST_PAIRS),
        device or Interpreter(),
        pin,
    )
    return Served(arena, kernel, hidden)


def random_batch(tokens: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, EXPERTS, (tokens * TOP_K,), generator=rng).tolist()
    return batch(tokens, hidden, ids, TOP_K, torch.bfloat16, tokens)
