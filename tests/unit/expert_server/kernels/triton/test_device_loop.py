"""The expert server's loop on a device: from slot to slot, with one wait for each batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from eaas.errors import DeviceLostError
from eaas.wire import SlotState
from eaas.wire.header import WireDtype
from eaas.wire.slot import Status
from expert_server.kernels import KernelSpec
from expert_server.weights.weights import ExpertForm, ExpertWeights
from fake_device import FakeDevice, Waits
from interpreted_triton import interpreted_kernel, needs_triton

pytestmark = needs_triton

# The interpreter takes a tenth of a second for a batch.
BUDGET_US = 60_000_000


class Setup:
    """A loop whose kernel multiplies by the expert's number (from 1), for x >= 0, on a fake device."""

    def __init__(self, benches) -> None:
        self.device = FakeDevice()
        form = ExpertForm(False, False, torch.relu)
        self.kernel = interpreted_kernel()([form] * 4, KernelSpec(torch.float32), self.device)
        one = torch.eye(benches.hidden)
        for expert in range(3):
            self.kernel.load(0, expert, ExpertWeights(one * (expert + 1), one))
        self.bench = benches(kernel=self.kernel)
        self.kernel.pin_slots(self.bench.arena.buffer)
        self.device.calls.clear()

    def write(self, client: str, x: float, expert: int = 1, **fields) -> int:
        slot: int = self.bench.write(
            self.bench.grant(client), x, expert, budget_us=BUDGET_US, **fields
        )
        return slot


@pytest.fixture
def setup(benches) -> Iterator[Setup]:
    setup = Setup(benches)
    yield setup
    setup.kernel.close()
    assert setup.device.pinned_bytes == 0


@pytest.mark.parametrize("dtype", [WireDtype.FLOAT32, WireDtype.BFLOAT16])
def test_a_batch_of_three_clients_has_one_wait_and_so_has_one_alone_with_a_checksum(
    setup, dtype: WireDtype
) -> None:
    xs = (2.0, 3.0, 5.0)
    # The bits of bfloat16 are written, not its values.
    bits = [int(torch.tensor(x).bfloat16().view(torch.int16)) for x in xs]
    values = bits if dtype is WireDtype.BFLOAT16 else xs
    slots = [setup.write(name, x, dtype=dtype) for name, x in zip("abc", values, strict=True)]
    with Waits() as waits:
        setup.bench.serve(*slots)
    assert setup.device.calls == {"copy to": 3 + 1, "copy back": 3, "wait": 1}
    assert not waits.names
    for slot, x in zip(slots, xs, strict=True):
        assert (setup.bench.rows(slot) == x * 2 * setup.bench.top_k).all()
    grant = setup.bench.grant("a")
    slot = setup.bench.write(grant, 2, budget_us=BUDGET_US, checksum=True)
    setup.device.calls.clear()
    setup.bench.serve(slot)
    assert setup.device.calls == {"copy to": 2, "copy back": 1, "wait": 1}
    status, rows_TH = setup.bench.take(grant, slot, checksum=True)
    assert (status, rows_TH[0, 0]) == (Status.OK, 8)


def test_an_expert_that_is_not_held_fails_only_its_own_request(setup) -> None:
    slots = [setup.write("a", 2), setup.write("b", 3, 3), setup.write("c", 5)]
    setup.bench.serve(*slots)
    assert setup.bench.result(slots[1]).status == Status.STALE_PLACEMENT
    assert [setup.bench.rows(slot)[0, 0] for slot in (slots[0], slots[2])] == [8, 20]


def test_the_answer_to_a_slot_revoked_meanwhile_is_dropped(setup) -> None:
    bench = setup.bench
    kept = setup.write("kept", 2)
    gone = bench.grant("gone")
    slot = bench.write(gone, 3, budget_us=BUDGET_US)

    def revoke(copies: int) -> None:
        setup.device.fails = lambda _copies: None
        bench.table.revoke(gone.connection_id)

    setup.device.fails = revoke
    bench.serve(kept, slot)
    assert (bench.rows(kept) == 8).all()
    assert bench.arena.flags.load(slot) == SlotState.OFFLINE


def test_a_device_that_fails_refuses_its_batch(setup) -> None:
    def fail(copies: int) -> None:
        setup.device.fails = lambda _copies: None
        raise RuntimeError("an illegal address")

    slot = setup.write("a", 2)
    setup.device.fails = fail
    setup.bench.serve(slot)
    assert setup.bench.result(slot).status == Status.INTERNAL
    slot = setup.write("b", 2)
    setup.bench.serve(slot)
    assert (setup.bench.rows(slot) == 8).all()


def test_a_lost_device_ends_the_loop(setup) -> None:
    def fail(copies: int) -> None:
        raise RuntimeError("an illegal address")

    setup.write("a", 2)
    setup.device.fails, setup.device.is_lost = fail, True
    with pytest.raises(DeviceLostError):
        setup.bench.loop.run()


def test_the_slots_memory_is_freed_when_loop_kernel_and_arena_are_closed(setup) -> None:
    bench = setup.bench
    setup.bench.serve(setup.write("a", 2))
    buffer = bench.arena.buffer
    bench.loop.stop()
    bench.loop.run()
    setup.kernel.close()
    bench.arena.close()
    with pytest.raises(ValueError, match="closed"):
        len(buffer)
