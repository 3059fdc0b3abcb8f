"""What a batch and a load do with a device: copies and waits are counted on a fake one."""

import gc
import mmap
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eaas.checkpoint.pieces import PIECE_BYTES
from eaas.errors import CheckpointError, ConfigError, DeviceFullError, DeviceLostError
from expert_layers import FORMS, batch, expert, in_slots
from expert_server.kernels import KernelSpec
from expert_server.kernels.gpu.device import Uploads
from expert_server.kernels.gpu.memory import memory_limit, taken
from expert_server.kernels.trial import ExpertSizes
from fake_device import FakeDevice, Waits
from interpreted_triton import interpreted_kernel, needs_triton, round_rows_alike

pytestmark = needs_triton


FORM = FORMS["swiglu"]
BFLOAT16 = torch.bfloat16


@pytest.fixture
def kernel_on(cleanup: ExitStack) -> Callable[..., Any]:
    """Makes kernels with experts of 64 to 32 in layer 0; nothing is counted yet."""

    def make(device: FakeDevice, experts: int = 2, dtype: torch.dtype = BFLOAT16) -> Any:
        kernel = interpreted_kernel()([FORM], KernelSpec(dtype), device)
        cleanup.callback(kernel.close)
        rng = torch.Generator().manual_seed(0)
        for number in range(experts):
            kernel.load(0, number, expert(FORM, 64, 32, dtype, rng))
        device.calls.clear()
        return kernel

    return make


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def kernel(device: FakeDevice, kernel_on: Callable[..., Any]) -> Any:
    return kernel_on(device)


def another_expert(seed: int = 3) -> Any:
    return expert(FORM, 64, 32, BFLOAT16, torch.Generator().manual_seed(seed))


def some_batch(tokens: int) -> Any:
    return batch(tokens, 64, some_ids(tokens).tolist(), 2, BFLOAT16, 0)


def some_ids(tokens: int, seed: int = 0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, 2, (tokens, 2), generator=rng, dtype=torch.int32)
    ids[0] = torch.tensor([0, 1])
    return ids


@pytest.mark.parametrize("tokens", [1, 7, 70])
def test_a_batch_waits_once(tokens: int, device: FakeDevice, kernel: Any) -> None:
    kernel(*some_batch(tokens), 0)
    # Rows and routes there, the result back.
    assert device.calls == {"copy to": 2, "copy back": 1, "wait": 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("can_pin", [True, False])
def test_from_slot_to_slot(can_pin, dtype, kernel_on, caplog, monkeypatch) -> None:
    """Each request's rows are read where they are, and its result is where it belongs."""
    round_rows_alike(monkeypatch)
    device = FakeDevice(can_pin)
    kernel = kernel_on(device, dtype=torch.float32)
    memory = mmap.mmap(-1, 1 << 16)
    kernel.pin_slots(memory)
    assert device.pinned_bytes == (len(memory) if can_pin else 0)
    assert (
        "cannot be page-locked (cudaHostRegister: out of memory; ulimit" in caplog.text
    ) != can_pin
    requests, results = in_slots(
        memory,
        [
            batch(tokens, 64, some_ids(tokens, seed).tolist(), 2, dtype, seed)
            for seed, tokens in enumerate((3, 1, 9))
        ],
    )
    kernel.compute_slots(requests, results, 0)
    copies = 3 if can_pin else 1
    assert device.calls == {"copy to": copies + 1, "copy back": copies, "wait": 1}
    for request, result in zip(requests, results, strict=True):
        assert torch.equal(kernel(*request, 0), result)
    requests[1][1].fill_(5)
    before = [result.clone() for result in results]
    with pytest.raises(LookupError, match="layer 0: expert 5 is not held"):
        kernel.compute_slots(requests, results, 0)
    assert all(map(torch.equal, results, before))
    for _, ids, _ in requests:
        ids.fill_(-1)
    kernel.compute_slots(requests, results, 0)
    assert not any(result.any() for result in results)
    kernel.close()
    assert device.pinned_bytes == 0
    kernel.close()


def test_a_batch_that_fails_midway_has_ended(device: FakeDevice, kernel: Any) -> None:
    """Nothing is written into slots after the error, and the next batch is right."""
    one = some_batch(5)
    right_TH = kernel(*one, 0).clone()

    def fail(copies: int) -> None:
        raise RuntimeError("the device is lost")

    device.fails = fail
    with pytest.raises(RuntimeError, match="the device is lost"):
        kernel(*one, 0)
    assert not device._back
    device.fails = lambda _copies: None
    assert torch.equal(kernel(*one, 0), right_TH)


def test_ids_beyond_int32_are_no_other_experts(kernel: Any) -> None:
    for wrong in (2**32, 2**32 + 1, -(2**32), 2**40):
        ids = torch.tensor([[wrong, 0]])
        with pytest.raises(LookupError, match=f"expert {wrong} is not held"):
            kernel(torch.ones(1, 64, dtype=torch.bfloat16), ids, torch.ones(1, 2), 0)


def test_no_operator_of_a_batch_waits(kernel: Any) -> None:
    with Waits() as waits:
        kernel(*some_batch(3), 0)
    assert waits.operators > 5
    assert not waits.names


@pytest.mark.parametrize("experts", [0, 1])
def test_nothing_to_compute_is_not_sent(experts, device, kernel_on) -> None:
    kernel = kernel_on(device, experts)
    none = torch.full((3, 2), -1, dtype=torch.int32)
    for tokens in (3, 0):
        out_TH = kernel(torch.ones(tokens, 64), none[:tokens], torch.ones(tokens, 2), 0)
        assert torch.equal(out_TH, torch.zeros(tokens, 64))
    assert not device.calls


def test_an_expert_is_on_the_device_before_it_is_held() -> None:
    """One wait for its pieces, one for the layer's table, then the table is published."""
    device = FakeDevice()
    form = FORMS["clamped"]
    kernel = interpreted_kernel()([form], KernelSpec(torch.bfloat16), device)
    weights = expert(form, 64, 32, torch.bfloat16, torch.Generator().manual_seed(0))
    kernel.load(0, 0, weights)
    # Gate, up, down, two biases and the table. A buffer is filled again once its last copy has ended.
    assert device.calls == {"piece": 6, "wait of a load": 2, "wait for a buffer": 3}
    kernel.unload(0, 0)
    assert device.calls["wait of a load"] == 2
    kernel.close()


@pytest.mark.parametrize("nbytes", [1, PIECE_BYTES, 5 * PIECE_BYTES + 3])
def test_the_host_fills_one_buffer_while_the_device_reads_the_other(nbytes: int) -> None:
    """What arrives is what was written, although copies happen late and the host's memory changes at once."""
    device = FakeDevice()
    uploads = Uploads(device)
    sent = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    source = sent.clone()
    with uploads.load():
        to = device.empty(nbytes, dtype=torch.uint8)
        uploads.write(to, source)
        source.zero_()
    assert torch.equal(to.as_subclass(torch.Tensor), sent)
    copies = -(-nbytes // PIECE_BYTES)
    assert device.calls["wait for a buffer"] == max(0, copies - 2)


def test_an_expert_that_fails_midway_is_not_held(device, kernel_on) -> None:
    def fail(copies: int) -> None:
        if copies == 3:
            raise torch.OutOfMemoryError("the device is full")

    kernel, weights = kernel_on(device, 0), another_expert()
    device.fails = fail
    with pytest.raises(CheckpointError, match=r"fake has no memory left for it: .*memory_bytes"):
        kernel.load(0, 0, weights)
    assert (kernel.count, kernel.bytes, kernel.holds(0, 0)) == (0, 0, False)
    kernel.load(0, 0, weights)
    assert kernel.holds(0, 0)


class Full(FakeDevice):
    """A device that has no memory for tables of addresses while `is_full`."""

    is_full = False

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        if self.is_full and dtype is torch.int64:
            raise torch.OutOfMemoryError("the device is full")
        return super().empty(*shape, dtype=dtype)


def test_a_full_device_keeps_what_it_holds_and_can_unload(kernel_on: Any) -> None:
    kernel = kernel_on(device := Full())
    one = some_batch(5)
    right_TH = kernel(*one, 0).clone()
    before = kernel.count, kernel.bytes
    weights = another_expert()
    device.is_full = True
    # A new one, and another one in the place of one that is held.
    for number in (2, 1):
        with pytest.raises(DeviceFullError, match=r"no memory left for it: .*memory_bytes"):
            kernel.load(0, number, weights)
    assert (kernel.count, kernel.bytes) == before
    assert [kernel.holds(0, number) for number in range(3)] == [True, True, False]
    assert torch.equal(kernel(*one, 0), right_TH)
    kernel.unload(0, 1)
    assert not kernel.holds(0, 1)
    with pytest.raises(LookupError, match="expert 1 is not held"):
        kernel(*one, 0)
    device.is_full = False
    kernel.load(0, 1, weights)
    assert not torch.equal(kernel(*one, 0), right_TH)
    kernel.unload(0, 1)
    kernel.unload(0, 0)
    assert (kernel.count, kernel.bytes) == (0, 0)


def test_ids_that_change_after_the_check_do_not_count(device: FakeDevice, kernel: Any) -> None:
    """A client writes while the device reads: the result is that of the ids that were checked."""
    one = some_batch(5)
    right_TH = kernel(*one, 0).clone()
    memory = mmap.mmap(-1, 1 << 16)
    kernel.pin_slots(memory)
    [(x_TH, ids_TK, scores_TK)], [result_TH] = in_slots(memory, [one])

    def change(_copies: int) -> None:
        ids_TK.fill_(1 << 20)
        scores_TK.fill_(99)

    device.fails = change
    kernel.compute_slots([(x_TH, ids_TK, scores_TK)], [result_TH], 0)
    assert torch.equal(result_TH, right_TH)


def test_code_that_does_not_fit_the_device_fails_its_batch_only(kernel, monkeypatch) -> None:
    """The loop refuses a batch whose kernel raises RuntimeError."""
    from triton.runtime.errors import OutOfResources

    from expert_server.kernels.gpu import launches

    one = some_batch(5)

    class Large:
        def __getitem__(self, grid: object) -> Any:
            raise OutOfResources(300_000, 232_448, "shared memory")

    with monkeypatch.context() as patch:
        patch.setattr(launches, "product", Large())
        with pytest.raises(RuntimeError, match=r"OutOfResources: .*shared memory"):
            kernel(*one, 0)
    assert kernel(*one, 0).isfinite().all()


def test_a_device_that_is_lost_in_a_load_is_named_so(device: FakeDevice, kernel: Any) -> None:
    weights = another_expert()
    device.is_lost = True
    with pytest.raises(DeviceLostError):
        kernel.load(0, 2, weights)
    assert not kernel.holds(0, 2)


def test_a_close_that_fails_is_not_repeated(device, kernel, monkeypatch) -> None:
    kernel.pin_slots(mmap.mmap(-1, 4096))

    def fail(memory: torch.Tensor) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(device, "unpin", fail)
    with pytest.raises(RuntimeError, match="the device is lost"):
        kernel.close()
    assert (kernel.count, kernel._tables) == (0, {})
    kernel.close()


@given(st.integers(256, 100 << 20))
def test_what_the_allocator_takes(nbytes: int) -> None:
    """As many replicas as the limit allows fit into segments as torch's allocator divides them."""
    assert nbytes <= taken(nbytes) < 2 * nbytes + (2 << 20)
    free = 100 << 30
    replicas = memory_limit("fake", 0, free, 0, nbytes) // nbytes
    if nbytes >= 10 << 20:
        needed = replicas * -(-nbytes // (2 << 20)) * (2 << 20)
    elif nbytes > 1 << 20:
        needed = -(-replicas // ((20 << 20) // nbytes)) * (20 << 20)
    else:
        needed = replicas * nbytes
    assert needed <= free


def test_memory_is_freed_once_the_running_batch_is_done(device: FakeDevice, kernel: Any) -> None:
    blocks = [weakref.ref(each.memory) for each in kernel._packed.values()]
    held = []

    def unload(copies: int) -> None:
        device.fails = lambda _copies: None
        thread = threading.Thread(target=kernel.unload, args=(0, 1))
        thread.start()
        thread.join()
        gc.collect()
        held.append([block() is not None for block in blocks])

    device.fails = unload
    one = some_batch(5)
    kernel(*one, 0)
    assert held == [[True, True]]
    gc.collect()
    assert [block() is not None for block in blocks] == [True, False]
    with pytest.raises(LookupError):
        kernel(*one, 0)


def test_experts_take_what_batches_leave() -> None:
    sizes = ExpertSizes(hidden=64, intermediate=32, num_experts=4, top_k=2)
    tokens = 1000

    def limit(free: int | None, wanted: int = 0) -> int:
        kernel = interpreted_kernel()(
            [FORMS["swiglu"]], KernelSpec(torch.bfloat16), FakeDevice(free=free)
        )
        try:
            return kernel.memory_limit(wanted, tokens, sizes, 12288)
        finally:
            kernel.close()

    # Without memory of its own, the setting counts.
    assert (limit(None), limit(None, 5)) == (0, 5)
    free = 10**9
    least = tokens * (64 * 10 + 2 * (2 * 64 + 4 * 64))
    assert 0.9 * (free - 2 * least) < limit(free) < free - least
    assert limit(free, 1000) == 1000
    with pytest.raises(
        ConfigError, match=r"memory_bytes 1000000000: fake has \d+ left for experts"
    ):
        limit(free, free)
    with pytest.raises(ConfigError, match=r"fake has 0.0 GB free, .* fewer expert_server.slots"):
        limit(1000)
    with pytest.raises(ConfigError, match=r"fake has 0\.0 GB free"):
        limit(0)


def test_the_fake_device_notices_waits_reads_and_early_changes() -> None:
    for wait in (
        lambda ids: ids[ids >= 0],
        lambda ids: bool((ids >= 0).any()),
        lambda ids: ids.abs().bincount(),
        lambda ids: ids.unique(),
        lambda ids: ids.max().item(),
        lambda ids: ids.nonzero(),
    ):
        with Waits() as waits:
            wait(torch.tensor([0, 3, -1]))
        assert waits.names
    device = FakeDevice()

    def change_early() -> None:
        with device.batch():
            buffer = device.pinned(16).zero_()
            device.copy(device.empty(16, dtype=torch.uint8), buffer)
            buffer.fill_(1)

    with pytest.raises(AssertionError, match="before the device had read it"):
        change_early()
    with device.batch():
        out = device.empty(4, dtype=torch.float32) + 1
    for read in (
        lambda out: out.numpy(),
        lambda out: out.cpu(),
        lambda out: out.sum().item(),
        lambda out: bool(out.any()),
        lambda out: torch.zeros(4).copy_(out),
        lambda out: out + torch.ones(4),
    ):
        with pytest.raises(AssertionError, match="memory of the device"):
            read(out)
