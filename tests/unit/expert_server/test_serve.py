"""Compiled code that waits for the requests of a lone client and answers them (`Slots.serve`)."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from eaas.wire import SlotState
from eaas.wire.slot import Status
from expert_server.kernels import KernelSpec
from expert_server.kernels.native import NativeKernel
from expert_server.loop import loop
from expert_server.transports.slot_ownership import Grant
from expert_server.weights.weights import ExpertForm, ExpertWeights

WAIT_S = 30.0


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll, with a deadline."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0)


@contextlib.contextmanager
def running(bench) -> Iterator[None]:
    """The loop runs in a thread, and compiled code serves from the first turn on."""
    bench.write(grant := bench.grant("first", 1), 1)
    bench.step()
    bench.take(grant, grant.first_slot)
    bench.table.revoke(grant.connection_id)
    thread = threading.Thread(target=bench.loop.run)
    thread.start()
    try:
        yield
    finally:
        bench.loop.stop()
        thread.join(WAIT_S)
    assert not thread.is_alive()


def ask(bench, grant: Grant, x: float, expert: int = 1, **fields) -> int:
    """Write a request, and wake the server."""
    slot: int = bench.write(grant, x, expert, **fields)
    bench.arena.flags.ring(0)
    return slot


def answer(bench, grant: Grant, slot: int, **fields) -> float:
    """Wait for an answer and take it; returns its first value."""
    wait_until(lambda: bench.arena.flags.load(slot) == SlotState.DONE)
    status, rows_TH = bench.take(grant, slot, **fields)
    assert status == Status.OK
    return float(rows_TH[0, 0])


@pytest.fixture
def slow_kernel() -> Iterator[NativeKernel]:
    """Each batch takes milliseconds: the experts are wide."""
    form = ExpertForm(False, False, torch.relu)
    kernel = NativeKernel([form] * 4, KernelSpec(torch.float32))
    wide = torch.zeros(1 << 19, 8)
    wide[:8] = torch.eye(8)
    kernel.load(0, 1, ExpertWeights(wide, wide.T.contiguous()))
    yield kernel
    kernel.close()


def test_answers_and_counts_one_after_the_other(benches, native_kernel) -> None:
    bench = benches(kernel=native_kernel)
    with running(bench):
        grant = bench.grant("a")
        for number in range(500):
            layer, expert = number % 4, number % 3
            slot = ask(bench, grant, number, expert, layer=layer, request_id=number)
            assert answer(bench, grant, slot, request_id=number) == 2 * number * (expert + 1)
            assert bench.loop.requests == number + 2
    assert bench.loop.computed == bench.loop.batches == 501
    assert (bench.loop.in_flight, bench.loop.refused, any(bench.table.busy)) == (0, 0, False)
    assert bench.loop.busy_s > 0


def test_others_are_left_to_the_loop(benches, native_kernel) -> None:
    """Requests with a checksum, for an expert that is not held, and two at once."""
    bench = benches(kernel=native_kernel)
    with running(bench):
        grant = bench.grant("a")
        slot = ask(bench, grant, 2, checksum=True)
        assert answer(bench, grant, slot, checksum=True) == 8
        slot = ask(bench, grant, 2, 99)
        wait_until(lambda: bench.arena.flags.load(slot) == SlotState.DONE)
        assert bench.loop.refused == 1
        assert bench.arena.client_free(slot)
        slots = [bench.write(grant, 3, slot=s) for s in (grant.first_slot, grant.first_slot + 1)]
        bench.arena.flags.ring(0)
        assert [answer(bench, grant, slot) for slot in slots] == [12, 12]
        assert answer(bench, grant, ask(bench, grant, 4)) == 16


def test_revoked_while_it_is_computed(benches, slow_kernel) -> None:
    """Row 16: the slot is neither answered nor granted before compiled code is done with it."""
    bench = benches(kernel=slow_kernel)
    met = 0
    with running(bench):
        for _ in range(20):
            grant = bench.grant("a", bench.slots)
            slot = ask(bench, grant, 2)
            wait_until(
                lambda slot=slot: (
                    bench.loop.in_flight == 1 or bench.arena.flags.load(slot) == SlotState.DONE
                )
            )
            bench.table.revoke(grant.connection_id)
            other = bench.table.grant("b", 1, bench.slots)
            if other is None:
                met += 1
                assert bench.arena.flags.load(slot) == SlotState.OFFLINE
            else:
                # The answer was there before.
                bench.table.revoke(other.connection_id)
            wait_until(lambda: not any(bench.table.busy))
            assert bench.arena.flags.load(slot) == SlotState.OFFLINE
    assert met > 0


def test_a_stop_ends_its_sleep(benches, native_kernel, monkeypatch) -> None:
    monkeypatch.setattr(loop, "_IDLE_US", 600_000_000)
    bench = benches(kernel=native_kernel)
    with running(bench):
        grant = bench.grant("a")
        assert answer(bench, grant, ask(bench, grant, 2)) == 8
        time.sleep(0.05)


def test_a_loader_gets_its_turn(benches, slow_kernel, monkeypatch) -> None:
    """A thread that waits for a gap between batches gets the first one."""
    monkeypatch.setattr(loop, "_MOST_US", 600_000_000)
    bench = benches(kernel=slow_kernel)
    with running(bench):
        grant = bench.grant("a")
        for _ in range(5):
            slot = ask(bench, grant, 2)
            began = time.monotonic()
            bench.loop.wait_idle(WAIT_S)
            assert time.monotonic() - began < WAIT_S / 2
            assert answer(bench, grant, slot) == 4


def test_a_batch_that_may_wait_is_left_to_the_loop(benches, native_kernel, monkeypatch) -> None:
    """With a second client, the policy decides how long a batch waits."""
    monkeypatch.setattr(loop, "_MOST_US", 0)
    bench = benches("window", 0.001, kernel=native_kernel)
    called: list[str] = []
    bench.watch(called.append)
    # The loop learns of a new client in its next turn.
    for name, served in [("a", 0), ("a", 1), ("b", 2), ("b", 2)]:
        slot = bench.write(grant := bench.grant(name), 1)
        bench.step()
        bench.take(grant, slot)
        assert called.count("serve") == served


def test_the_watchdog_sees_what_it_does(benches, slow_kernel) -> None:
    bench = benches(kernel=slow_kernel)
    with running(bench):
        grant = bench.grant("a")
        slot = ask(bench, grant, 2)
        wait_until(lambda: bench.loop.in_flight == 1)
        since, tokens = bench.loop.slots.verbs.doing
        assert tokens in (0, 2)
        still_s, patience_s = bench.loop.liveness.still(since + 100, 0.0)
        assert still_s > 90
        assert patience_s < 90
        assert answer(bench, grant, slot) == 4
