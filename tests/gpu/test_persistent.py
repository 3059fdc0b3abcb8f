"""The persistent kernel on a GPU, against the reference in float64; skipped without one. Never run."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch

from eaas.wire.header import Status
from expert_layers import FORMS, expert
from expert_server.kernels import KernelSpec, ReferenceKernel
from expert_server.kernels.gpu import nvrtc
from expert_server.kernels.gpu.cuda import Gpu
from expert_server.kernels.gpu.launch import Launched, Registered, load_driver
from expert_server.weights.weights import ExpertWeights
from persistent_slots import EXPERTS, Served, made, pack, random_batch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

FORM, HIDDEN, INTERMEDIATE = FORMS["clamped"], 512, 200


@contextmanager
def serving() -> Iterator[tuple[Served, list[ExpertWeights]]]:
    """Serve layer 1 with all experts; slot 0 has generation 7."""
    device, driver = Gpu("cuda"), load_driver()
    major, minor = torch.cuda.get_device_capability()
    program = nvrtc.persistent_program(nvrtc.find_nvrtc(), f"sm_{major}{minor}")
    rng = torch.Generator().manual_seed(0)
    weights = [expert(FORM, HIDDEN, INTERMEDIATE, torch.bfloat16, rng) for _ in range(EXPERTS)]
    packed = [pack(each, FORM, device) for each in weights]
    served = made(FORM, HIDDEN, packed[0], device, torch.Tensor.pin_memory)
    arena = served.arena
    address = ctypes.addressof(ctypes.c_char.from_buffer(arena.buffer))
    with ExitStack() as stack:
        registered = Registered(driver, address, arena.size)
        stack.callback(registered.close)
        launched = Launched(driver, program, served.kernel)
        stack.callback(launched.close, 20.0)
        for number, each in enumerate(packed):
            served.kernel.publish(1, number, each)
        assert served.kernel.grant(0, 7)
        yield served, weights


def test_serves_without_the_cpu() -> None:
    """Answers many requests, refuses an expert that is withdrawn, and ends when it is told to."""
    reference = ReferenceKernel([FORM], KernelSpec(torch.float64))
    with serving() as (served, weights):
        for number, each in enumerate(weights):
            reference.load(0, number, each)
        for turn in range(300):
            one = random_batch(1 + turn % 8, HIDDEN)
            answer, result_TH = served.ask(served.header(len(one[0])), one)
            assert answer.status == Status.OK
            right_TH = reference(*one, 0)
            assert (result_TH - right_TH).norm() <= 1e-2 * right_TH.norm()
        for number in range(EXPERTS):
            served.kernel.withdraw(1, number, 10.0)
        answer, _ = served.ask(served.header(8), random_batch(8, HIDDEN))
        assert answer.status == Status.STALE_PLACEMENT
