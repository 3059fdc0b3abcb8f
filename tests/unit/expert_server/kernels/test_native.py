"""Properties of the compiled kernel only; test_kernels.py compares it with the reference."""

import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from expert_server.kernels import KernelSpec, Quantization, _native, native, panels
from expert_server.kernels.activation import Activation, ActivationKind
from expert_server.kernels.native import NativeKernel
from expert_server.kernels.panels import pack_expert
from expert_server.weights.weights import ExpertForm, ExpertWeights
from helper_process import output_of
from waiting import eventually

FORMS = [ExpertForm(False, False, functional.relu)]


@given(
    hidden=st.integers(1, 300),
    intermediate=st.integers(1, 300),
    spec=st.sampled_from(
        [KernelSpec(torch.bfloat16), *(KernelSpec(torch.float32, each) for each in Quantization)]
    ),
    is_interleaved=st.booleans(),
)
def test_packing_in_pieces_gives_the_same_bytes(hidden, intermediate, spec, is_interleaved) -> None:
    weights = ExpertWeights(
        torch.randn(2 * intermediate, hidden).to(spec.dtype),
        torch.randn(hidden, intermediate).to(spec.dtype),
    )
    activation = Activation(ActivationKind.SILU, True, is_interleaved=is_interleaved)
    packed = []
    for piece in (1 << 30, 4096):
        pause = mock.Mock()
        with mock.patch.object(panels, "PIECE_BYTES", piece):
            one = pack_expert(weights, activation, spec, pause)
        packed.append((one.memory, pause.call_count))
    (whole, least), (pieces, count) = packed
    assert torch.equal(whole, pieces)
    assert least == 3
    assert count >= weights.nbytes // max(4096, 16 * 4 * max(hidden, intermediate))


@pytest.mark.parametrize("threads", [0, -1])
def test_no_pool_without_threads(threads: int) -> None:
    with pytest.raises(ValueError, match=f"{threads} threads"):
        _native.create_pool(threads)


def tids() -> set[str]:
    return {path.name for path in Path("/proc/self/task").iterdir()}


def test_close_ends_the_threads() -> None:
    before = tids()
    kernel = NativeKernel(FORMS, KernelSpec(torch.float32, threads=4))
    started = tids() - before
    assert len(started) == 3
    for _ in range(2):  # idempotent
        kernel.close()
    # A join returns shortly before the system removes the thread.
    eventually(lambda: not started & tids(), 10, "the threads' end")


@pytest.mark.parametrize(
    "spec", [KernelSpec(torch.bfloat16, threads=3), KernelSpec(torch.float32, Quantization.INT8, 3)]
)
def test_the_caller_alone_computes_the_same(spec, monkeypatch) -> None:
    """A small batch takes less time than to wake the threads."""
    rng = torch.Generator().manual_seed(0)
    weights = ExpertWeights(
        torch.randn(384, 256, generator=rng).to(spec.dtype),
        torch.randn(256, 384, generator=rng).to(spec.dtype),
    )
    batch = (
        torch.randn(5, 256, generator=rng),
        torch.tensor([[0, -1]] * 5),
        torch.rand(5, 2, generator=rng),
        0,
    )
    outs = []
    for learns in (False, True):
        monkeypatch.setattr(native, "_LEARNS", learns)
        kernel = NativeKernel(FORMS, spec)
        kernel.load(0, 0, weights)
        # It learns by the caller alone first, and then by all threads.
        outs += [kernel(*batch).clone() for _ in range(3)]
        kernel.close()
    assert outs[0].any()
    assert all(torch.equal(out, outs[0]) for out in outs)


_CHANGING_IDS = """
import threading, time
import numpy as np, torch
from expert_server.kernels import KernelSpec
from expert_server.kernels.native import NativeKernel
from expert_server.weights.weights import ExpertForm, ExpertWeights

torch.set_num_threads(1)
form = ExpertForm(False, False, torch.relu)
kernel = NativeKernel([form], KernelSpec(torch.float32))
kernel.load(0, 0, ExpertWeights(torch.ones(1, 1), torch.ones(1, 1)))
x_TH, scores_TK = torch.ones(256, 1), torch.ones(256, 256)

def change(ids_TK, stop):
    while not stop.is_set():
        ids_TK[-1] = 0x3F800000
        ids_TK[-1] = -1

answers = set()
for dtype in (np.int32, np.int64):
    # Nothing to compute: the time of a call goes into the ids, most of it between two looks at the last row.
    ids_TK, stop = np.full((256, 256), -1, dtype), threading.Event()
    thread = threading.Thread(target=change, args=(ids_TK, stop))
    thread.start()
    end, seen = time.monotonic() + 0.75, len(answers) + 2
    while time.monotonic() < end or len(answers) < seen:
        try:
            kernel(x_TH, torch.from_numpy(ids_TK), scores_TK, 0)
            answers.add((dtype, "zero"))
        except LookupError:
            answers.add((dtype, "not held"))
    stop.set()
    thread.join()
"""


def test_ids_that_change_during_a_call_do_not_crash() -> None:
    """The ids are in memory that a client can write."""
    output_of(sys.executable, "-c", _CHANGING_IDS)


@given(
    n=st.integers(1, 50),
    words=st.integers(1, 50),
    gap=st.integers(0, 3),
    panel_gap=st.integers(0, 2),
    seed=st.integers(0, 9),
)
def test_pack_rows_into_panels(n: int, words: int, gap: int, panel_gap: int, seed: int) -> None:
    """Strided rows, and interleaved panels; the last panel's padding is not written."""
    rows = np.random.default_rng(seed).integers(1, 1 << 31, (n, words + gap), np.int32)
    count = -(-n // 16)
    out = np.zeros((count, words + panel_gap, 16), np.int32)
    _native.pack(rows.ctypes.data, words + gap, n, words, out.ctypes.data, 16 * (words + panel_gap))
    padded = np.zeros((16 * count, words), np.int32)
    padded[:n] = rows[:, :words]
    wanted = padded.reshape(count, 16, words).transpose(0, 2, 1)
    assert np.array_equal(out[:, :words], wanted)
    assert not out[:, words:].any()
