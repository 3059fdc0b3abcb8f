"""The persistent kernel (persistent.cu) on threads and through the compiler, since there is no GPU."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from eaas.wire.header import ResultHeader, SlotState, Status
from expert_layers import FORMS, batch, expert
from expert_server.kernels import KernelSpec, ReferenceKernel
from expert_server.kernels.gpu import nvrtc
from expert_server.kernels.gpu.packing import DeviceExpert
from expert_server.kernels.gpu.persistent import Arguments
from expert_server.kernels.kernel import UnsupportedError
from expert_server.weights.weights import ExpertForm, ExpertWeights
from persistent_slots import EXPERTS, LAYERS, MOST_PAIRS, TOP_K, Served, made, pack, random_batch

ROOT = Path(__file__).parents[5]
SOURCE = ROOT / "tests/helpers/persistent_threads.cpp"
BLOCKS, LANES = 2, 3


def build(folder: Path, *options: str) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++")
    output = folder / "persistent"
    command = [compiler, "-std=c++17", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"]
    command += [f"-I{ROOT}", str(SOURCE), "-o", str(output), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    if "libtsan" in done.stderr:
        pytest.skip("this g++ has no ThreadSanitizer")
    assert done.returncode == 0, done.stderr
    return output


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return ctypes.CDLL(str(build(tmp_path_factory.mktemp("lib"), "-shared", "-fPIC")))


@contextmanager
def serving(
    library: ctypes.CDLL, form: ExpertForm, hidden: int, intermediate: int
) -> Iterator[tuple[Served, list[ExpertWeights]]]:
    """Serve layer 1 with all experts; slot 0 has generation 7."""
    rng = torch.Generator().manual_seed(0)
    weights = [expert(form, hidden, intermediate, torch.bfloat16, rng) for _ in range(EXPERTS)]
    packed = [pack(each, form) for each in weights]
    served = made(form, hidden, packed[0])
    for number, each in enumerate(packed):
        served.kernel.publish(1, number, each)
    assert served.kernel.grant(0, 7)
    arguments = ctypes.byref(served.kernel.arguments)
    device = threading.Thread(target=library.serve_on_threads, args=(arguments, BLOCKS, LANES))
    device.start()
    try:
        yield served, weights
    finally:
        served.kernel.stop()
        device.join(20)
        assert not device.is_alive()


# -- what it computes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("hidden", "intermediate"), [(64, 64), (50, 27)])
def test_equals_the_reference(
    library: ctypes.CDLL, name: str, hidden: int, intermediate: int
) -> None:
    """With and without gate, biases and padding; few rows per expert and more than a warp takes at once."""
    form = FORMS[name]
    reference = ReferenceKernel([form], KernelSpec(torch.float64))
    with serving(library, form, hidden, intermediate) as (served, weights):
        for number, each in enumerate(weights):
            reference.load(0, number, each)
        one_expert = batch(8, hidden, [2, -1, -1] * 8, TOP_K, torch.bfloat16, 0)
        for one in (random_batch(1, hidden), random_batch(8, hidden), one_expert):
            answer, result_TH = served.ask(served.header(len(one[0])), one)
            assert answer == ResultHeader.of(
                Status.OK, generation=7, request_id=11, rows=len(one[0]), hidden_size=hidden
            )
            right_TH = reference(*one, 0)
            assert (result_TH - right_TH).norm() <= 1e-2 * right_TH.norm()


def test_all_pairs_without_an_expert_give_zeros(library: ctypes.CDLL) -> None:
    with serving(library, FORMS["swiglu"], 64, 32) as (served, _):
        none = batch(2, 64, [-1] * 2 * TOP_K, TOP_K, torch.bfloat16, 0)
        answer, result_TH = served.ask(served.header(2), none)
        assert answer.status == Status.OK
        assert torch.equal(result_TH, torch.zeros(2, 64))


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"magic": 1}, Status.INTERNAL),
        ({"version": 9}, Status.INTERNAL),
        ({"generation": 6}, Status.INTERNAL),
        ({"flags": 1}, Status.INTERNAL),
        ({"checksum": 5}, Status.INTERNAL),
        ({"payload_length": 4}, Status.INTERNAL),
        ({"dtype": 0}, Status.INVALID_ARGUMENT),
        ({"hidden_size": 32}, Status.INVALID_ARGUMENT),
        ({"layer": LAYERS}, Status.INVALID_ARGUMENT),
        ({"batch_size": 0}, Status.INVALID_ARGUMENT),
        ({"top_k": 0}, Status.INVALID_ARGUMENT),
        ({"batch_size": MOST_PAIRS}, Status.INVALID_ARGUMENT),
        ({"batch_size": 2**32 - 1, "top_k": 2**32 - 1}, Status.INVALID_ARGUMENT),
        ({"budget_us": 0}, Status.EXPIRED),
        ({"layer": 0}, Status.STALE_PLACEMENT),
    ],
)
def test_a_wrong_request_is_refused_and_the_next_is_answered(
    library: ctypes.CDLL, changes: dict[str, int], status: Status
) -> None:
    with serving(library, FORMS["swiglu"], 64, 32) as (served, _):
        one = random_batch(2, 64)
        answer, _ = served.ask(served.header(2, **changes), one)
        assert answer == ResultHeader.of(status, generation=7, request_id=11)
        assert served.ask(served.header(2), one)[0].status == Status.OK


@pytest.mark.parametrize("number", [EXPERTS, -2, 2**31 - 1])
def test_an_unknown_expert_is_refused(library: ctypes.CDLL, number: int) -> None:
    with serving(library, FORMS["swiglu"], 64, 32) as (served, _):
        x_TH, ids_TK, scores_TK = random_batch(2, 64)
        ids_TK[1, 1] = number
        answer, _ = served.ask(served.header(2), (x_TH, ids_TK, scores_TK))
        assert answer.status == Status.STALE_PLACEMENT


# -- its memory ----------------------------------------------------------------------------------------


def test_both_sides_have_one_layout(library: ctypes.CDLL) -> None:
    assert library.arguments_bytes() == ctypes.sizeof(Arguments)
    assert library.job_bytes() <= 256


def test_a_withdrawn_expert_is_refused_until_it_is_back(library: ctypes.CDLL) -> None:
    with serving(library, FORMS["swiglu"], 64, 32) as (served, weights):
        one = batch(1, 64, [3, 0, -1], TOP_K, torch.bfloat16, 0)
        before_TH = served.ask(served.header(1), one)[1]
        served.kernel.withdraw(1, 3, 10.0)
        assert served.ask(served.header(1), one)[0].status == Status.STALE_PLACEMENT
        served.kernel.publish(1, 3, pack(weights[3], FORMS["swiglu"]))
        answer, result_TH = served.ask(served.header(1), one)
        assert answer.status == Status.OK
        assert torch.equal(result_TH, before_TH)


def idle(form: ExpertForm = FORMS["swiglu"]) -> tuple[Served, DeviceExpert]:
    rng = torch.Generator().manual_seed(0)
    packed = pack(expert(form, 64, 32, torch.bfloat16, rng), form)
    return made(form, 64, packed), packed


def word_at(address: int | None) -> Any:
    assert address is not None
    return ctypes.c_uint32.from_address(address)


def test_an_expert_that_a_request_may_use_is_kept() -> None:
    served, packed = idle()
    served.kernel.publish(1, 0, packed)
    begun, ended = (word_at(served.kernel.arguments.begun), word_at(served.kernel.arguments.ended))
    begun.value, ended.value = 0, 2**32 - 1
    with pytest.raises(TimeoutError, match="the device is busy with one request"):
        served.kernel.withdraw(1, 0, 0.01)
    # Its memory is kept: it cannot be published anew.
    with pytest.raises(ValueError, match="layer 1: expert 0 is published"):
        served.kernel.publish(1, 0, packed)
    ended.value = 0
    served.kernel.withdraw(1, 0, 0.01)
    served.kernel.publish(1, 0, packed)


def test_a_slot_is_not_granted_while_the_device_is_busy_with_it() -> None:
    served, _ = idle()
    busy = word_at(served.kernel.arguments.busy)
    busy.value = 1
    assert not served.kernel.grant(0, 3)
    busy.value = 0
    assert served.kernel.grant(0, 3)
    assert served.arena.flags.load(0) == SlotState.FREE
    assert served.arena.generation(0) == 3
    assert word_at(served.kernel.arguments.generations).value == 3
    served.kernel.revoke(0)
    assert served.arena.flags.load(0) == SlotState.OFFLINE
    assert word_at(served.kernel.arguments.generations).value == 0


def test_a_slot_without_an_owner_is_not_answered(library: ctypes.CDLL) -> None:
    with serving(library, FORMS["swiglu"], 64, 32) as (served, _):
        served.kernel.revoke(0)
        served.arena.server_reclaim(0)
        assert served.arena.client_write_done(0)
        assert served.kernel.grant(1, 7)
        assert served.ask(served.header(1), random_batch(1, 64), slot=1)[0].status == Status.OK
        assert served.arena.flags.load(0) == SlotState.WRITTEN


def test_other_weights_are_refused() -> None:
    form = FORMS["swiglu"]
    rng = torch.Generator().manual_seed(0)
    wide = expert(form, 64, 32, torch.float32, rng)
    with pytest.raises(UnsupportedError, match="bfloat16 experts of even hidden size"):
        made(form, 64, pack(wide, form, dtype=torch.float32))
    odd = expert(form, 63, 32, torch.bfloat16, rng)
    with pytest.raises(UnsupportedError, match="bfloat16 experts of even hidden size"):
        made(form, 63, pack(odd, form))


# -- races ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("exchanges", "seconds"),
    [(3_000, 5), pytest.param(300_000, 600, marks=pytest.mark.nightly)],
)
@pytest.mark.timeout(700)
def test_requests_losses_and_loads_without_a_race(
    tmp_path: Path, exchanges: int, seconds: int
) -> None:
    program = build(tmp_path, "-DAS_PROGRAM", "-fsanitize=thread")
    done = subprocess.run(
        [program, str(exchanges), str(seconds)],
        capture_output=True,
        text=True,
        timeout=seconds + 60,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    answers, refused, losses, swaps, wrong = map(int, done.stdout.split())
    # On a busy machine it ends early.
    assert min(answers, refused, losses, swaps) > 0
    assert answers + refused + losses <= exchanges
    assert wrong == 0


def test_an_expert_that_is_freed_at_once_is_noticed(tmp_path: Path) -> None:
    program = build(tmp_path, "-DAS_PROGRAM", "-DFREE_AT_ONCE", "-fsanitize=thread")
    done = subprocess.run(
        [program, "3000", "5"],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"TSAN_OPTIONS": "halt_on_error=1"},
    )
    assert done.returncode != 0
    assert "data race" in done.stderr


# -- the compiler --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiler() -> ctypes.CDLL:
    try:
        return nvrtc.find_nvrtc()
    except UnsupportedError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_the_program_does_not_spill(
    compiler: ctypes.CDLL, architecture: str, tmp_path: Path
) -> None:
    program = tmp_path / "program.cubin"
    program.write_bytes(nvrtc.persistent_program(compiler, architecture))
    triton = pytest.importorskip("triton", reason="Triton has the program that reads it")
    tool = Path(triton.__path__[0]) / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run(
        [tool, "-res-usage", program], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    assert found is not None, usage
    registers, stack, shared, local = map(int, found.groups())
    assert (stack, shared, local) == (0, 0, 0)
    # Of 256 threads.
    assert registers * 256 <= 64 << 10


def test_an_error_of_the_compiler_is_shown(compiler: ctypes.CDLL) -> None:
    with pytest.raises(UnsupportedError, match=r"x\.cu does not compile for sm_90: .*x\.cu\(1\)"):
        nvrtc.compile_text(compiler, "int f() { return y; }", "x.cu", {}, "sm_90")


def test_without_the_compiler_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_name: str) -> Any:
        raise OSError("no such library")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(UnsupportedError, match="nvidia-cuda-nvrtc-cu12"):
        nvrtc.find_nvrtc()
