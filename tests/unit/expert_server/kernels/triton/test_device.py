"""What a batch and a load do with a device: copies and waits are counted on a fake one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from expert_layers import FORMS, batch, expert
from expert_server.kernels import KernelSpec
from expert_server.kernels.gpu.device import Interpreter
from interpreted_triton import interpreted_kernel, needs_triton

pytestmark = needs_triton

# Operators whose result's shape or value the host needs: with a GPU, they wait for it.
WAITING = {
    "aten::_local_scalar_dense",
    "aten::bincount",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
    "aten::unique_dim",
    "aten::_unique2",
    "aten::repeat_interleave",
}


class Counting(Interpreter):
    """Counts what would copy or wait, and refuses device work outside of a batch or a load."""

    name = "fake"

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._stream = ""

    @contextmanager
    def batch(self) -> Iterator[None]:
        with self._within("batch"), super().batch():
            yield

    @contextmanager
    def loading(self) -> Iterator[None]:
        with self._within("loading"), super().loading():
            yield
        self.calls["wait of a load"] += 1

    def send(self, host: torch.Tensor) -> torch.Tensor:
        assert self._stream == "batch"
        self.calls["copy to"] += 1
        return super().send(host)

    def receive(self, result: torch.Tensor) -> torch.Tensor:
        assert self._stream == "batch"
        self.calls["copy back and wait"] += 1
        return super().receive(result)

    def write(self, to: torch.Tensor, host: torch.Tensor) -> None:
        assert self._stream == "loading"
        self.calls["piece"] += 1
        super().write(to, host)

    @contextmanager
    def _within(self, stream: str) -> Iterator[None]:
        assert not self._stream
        self._stream = stream
        try:
            yield
        finally:
            self._stream = ""


class Waits(TorchDispatchMode):
    """Lists the operators that would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        self.operators += 1
        # A mask as an index is turned into numbers.
        is_mask = name.startswith("aten::index") and any(
            each is not None and each.dtype is torch.bool for each in args[1]
        )
        if name in WAITING or is_mask:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tokens", [1, 7, 70])
def test_a_batch_waits_once(tokens: int) -> None:
    device = Counting()
    form = FORMS["swiglu"]
    kernel = interpreted_kernel()([form], KernelSpec(torch.bfloat16), device)
    rng = torch.Generator().manual_seed(0)
    for number in range(2):
        kernel.load(0, number, expert(form, 64, 32, torch.bfloat16, rng))
    device.calls.clear()
    ids = torch.randint(-1, 2, (tokens, 2), generator=rng)
    ids[0] = torch.tensor([0, 1])
    kernel(*batch(tokens, 64, ids.tolist(), 2, torch.bfloat16, 0), 0)
    assert device.calls == {"copy to": 3, "copy back and wait": 1}
    kernel.close()


def test_no_operator_of_a_batch_waits() -> None:
    form = FORMS["swiglu"]
    kernel = interpreted_kernel()([form], KernelSpec(torch.bfloat16))
    kernel.load(0, 2, expert(form, 40, 24, torch.bfloat16, torch.Generator().manual_seed(0)))
    one = batch(3, 40, [2, -1, -1, 2, 2, -1], 2, torch.bfloat16, 0)
    with Waits() as waits:
        kernel(*one, 0)
    assert waits.operators > 5
    assert not waits.names
    kernel.close()


@pytest.mark.parametrize(
    "wait",
    [
        lambda ids: ids[ids >= 0],
        lambda ids: bool((ids >= 0).any()),
        lambda ids: ids.abs().bincount(),
        lambda ids: ids.unique(),
        lambda ids: ids.max().item(),
        lambda ids: ids.nonzero(),
    ],
)
def test_what_waits_is_noticed(wait: Callable[[torch.Tensor], object]) -> None:
    with Waits() as waits:
        wait(torch.tensor([0, 3, -1]))
    assert waits.names


def test_nothing_to_compute_is_not_sent() -> None:
    device = Counting()
    form = FORMS["swiglu"]
    kernel = interpreted_kernel()([form], KernelSpec(torch.float32), device)
    none = torch.full((3, 2), -1, dtype=torch.int32)
    assert torch.equal(kernel(torch.ones(3, 8), none, torch.ones(3, 2), 0), torch.zeros(3, 8))
    kernel.load(0, 0, expert(form, 8, 8, torch.float32, torch.Generator().manual_seed(0)))
    device.calls.clear()
    for tokens in (3, 0):
        out_TH = kernel(torch.ones(tokens, 8), none[:tokens], torch.ones(tokens, 2), 0)
        assert torch.equal(out_TH, torch.zeros(tokens, 8))
    assert not device.calls
    kernel.close()


def test_an_expert_is_on_the_device_before_it_is_held() -> None:
    """One wait for its pieces, one for the layer's table, then the table is published."""
    device = Counting()
    form = FORMS["clamped"]
    kernel = interpreted_kernel()([form], KernelSpec(torch.bfloat16), device)
    weights = expert(form, 64, 32, torch.bfloat16, torch.Generator().manual_seed(0))
    kernel.load(0, 0, weights)
    # Gate, up, down, two biases and the table.
    assert device.calls == {"piece": 6, "wait of a load": 2}
    kernel.unload(0, 0)
    assert device.calls == {"piece": 7, "wait of a load": 3}
    kernel.close()


def test_an_expert_that_fails_midway_is_not_held() -> None:
    class Full(Counting):
        def write(self, to: torch.Tensor, host: torch.Tensor) -> None:
            super().write(to, host)
            if self.calls["piece"] == 3:
                raise MemoryError("the device is full")

    form = FORMS["swiglu"]
    kernel = interpreted_kernel()([form], KernelSpec(torch.bfloat16), Full())
    weights = expert(form, 64, 32, torch.bfloat16, torch.Generator().manual_seed(0))
    with pytest.raises(MemoryError, match="the device is full"):
        kernel.load(0, 0, weights)
    assert (kernel.count, kernel.bytes, kernel.holds(0, 0)) == (0, 0, False)
    kernel.load(0, 0, weights)
    assert kernel.holds(0, 0)
    kernel.close()
