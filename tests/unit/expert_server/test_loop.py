"""The loop, one round at a time, without threads: the test acts as the client."""

import errno
import threading
import time
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eaas.wire import SlotState
from eaas.wire.header import (
    REQUEST_HEADER_BYTES,
    RESULT_HEADER_BYTES,
    Status,
    WireDtype,
)
from eaas.wire.slot import DOORBELL
from expert_server.transports.slot_ownership import Grant

HIDDEN, TOP_K, EXPERTS, TOKENS, SLOTS = 8, 2, 4, 4, 6


def test_one_batch_per_layer_and_dtype_and_each_client_its_rows(bench) -> None:
    grants = [bench.grant(name, 1) for name in "abcd"]
    slots = [
        bench.write(grant, x, layer=layer, tokens=tokens)
        for grant, x, layer, tokens in zip(grants, (2, 3, 5), (0, 1, 0), (1, 2, 4), strict=False)
    ]
    slots.append(bench.write(grants[3], 0x4040, dtype=WireDtype.BFLOAT16))  # 3.0
    bench.serve(*slots)
    assert sorted(bench.kernel.batches) == [(0, 2), (0, 5), (1, 2)]
    for slot, x, tokens in zip(slots, (2, 3, 5, 3), (1, 2, 4, 2), strict=True):
        assert (bench.rows(slot) == np.full((tokens, HIDDEN), x * 2 * TOP_K)).all()


def test_an_answer_states_the_time_that_went_to_other_requests(bench) -> None:
    bench.loop._clock = time.monotonic
    bench.kernel.on_call = lambda: time.sleep(0.04)
    slots = [
        bench.write(bench.grant(name), 2, layer=layer, tokens=tokens)
        for name, layer, tokens in (("a", 0, 1), ("b", 0, 3), ("c", 1, 1))
    ]
    bench.serve(*slots)
    own_us = [r.service_us - r.queue_us for r in map(bench.result, slots)]
    # Of a batch, each request's part by its tokens; the other layer's waited for it.
    assert own_us[0] >= 9_000
    assert own_us[1] == pytest.approx(3 * own_us[0], rel=0.01, abs=5)
    assert own_us[2] >= 39_000
    assert bench.result(slots[0]).queue_us >= 29_000
    assert bench.result(slots[2]).queue_us >= 39_000


def test_busy_time_excludes_waiting(bench) -> None:
    bench.loop._clock = time.monotonic
    bench.kernel.on_call = lambda: time.sleep(0.05)
    grant = bench.grant("a")
    written_at = []

    def write() -> None:
        written_at.append(time.monotonic())
        bench.write(grant, 2)
        bench.arena.flags.ring(DOORBELL)

    writer = threading.Timer(0.2, write)
    writer.start()
    while not bench.kernel.batches:
        bench.loop.step(bench.arena.flags.seq(DOORBELL))
    ended_at = time.monotonic()
    writer.join()
    assert 0.05 <= bench.loop.busy_s <= ended_at - written_at[0]


def test_it_is_busy_from_a_request_to_its_answer(bench) -> None:
    seen = []
    bench.kernel.on_call = lambda: seen.append(bench.loop.is_busy)
    grant = bench.grant("a")
    assert not bench.loop.is_busy
    slot = bench.write(grant, 2)
    assert bench.loop.is_busy
    bench.serve(slot)
    assert seen == [True]
    assert not bench.loop.is_busy
    bench.write(grant, 2, slot=grant.first_slot + 1)
    bench.loop.stop()
    bench.arena.close()
    assert not bench.loop.is_busy


def test_wait_idle_ends_with_the_last_answer_or_its_time(bench) -> None:
    grants = [bench.grant(name) for name in "ab"]
    for layer, grant in enumerate(grants):
        bench.write(grant, 2, layer=layer)
    woken = []

    def wait() -> None:
        bench.loop.wait_idle(60.0)
        woken.append(len(bench.kernel.batches))

    bench.loop.wait_idle(0.01)
    assert bench.loop.is_busy
    waiter = threading.Thread(target=wait)
    waiter.start()
    while bench.loop._idle.is_set():
        time.sleep(0.001)
    while len(bench.kernel.batches) < 2:
        bench.loop.step(bench.arena.flags.seq(DOORBELL))
        assert not woken
    # The next step has nothing to do, and would wait.
    bench.arena.flags.interrupt(DOORBELL)
    bench.loop.step(bench.arena.flags.seq(DOORBELL) - 1)
    waiter.join(30)
    assert woken == [2]
    bench.loop.wait_idle(60.0)


def test_an_unknown_expert_fails_only_its_own_request(bench) -> None:
    good, bad, other = (bench.grant(name) for name in "abc")
    slots = [bench.write(good, 2), bench.write(bad, 3, EXPERTS), bench.write(other, 5)]
    bench.serve(*slots)
    assert (bench.rows(slots[0]) == 8).all()
    assert (bench.rows(slots[2]) == 20).all()
    refused = bench.result(slots[1])
    assert (refused.status, refused.rows, refused.detail) == (Status.STALE_PLACEMENT, 0, 42)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("the kernel broke"),
        ValueError("the kernel broke"),
        OSError(errno.ENOMEM, "no pages for scratch memory"),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_broken_kernel_refuses_its_batch_and_the_loop_goes_on(bench, error: Exception) -> None:
    bench.kernel.breaks_with = error
    slot = bench.write(bench.grant("a"), 13, layer=1)
    other = bench.write(bench.grant("b"), 2)
    bench.serve(slot, other)
    assert bench.result(slot).status == Status.INTERNAL
    assert (bench.rows(other) == 8).all()


@pytest.mark.parametrize(
    ("lie", "status"),
    [
        ({"hidden_size": 4}, Status.INVALID_ARGUMENT),
        ({"dtype": 9}, Status.INVALID_ARGUMENT),
        ({"layer": 4}, Status.INVALID_ARGUMENT),
        ({"batch_size": 0}, Status.INVALID_ARGUMENT),
        ({"magic": 1}, Status.INTERNAL),
        ({"version": 9}, Status.INTERNAL),
        ({"generation": 999}, Status.INTERNAL),
        ({"payload_length": 1}, Status.INTERNAL),
        ({"batch_size": 2**32 - 1}, Status.INTERNAL),
        ({"top_k": 2**32 - 1}, Status.INTERNAL),
    ],
)
def test_a_wrong_header_is_refused_with_its_status(bench, lie, status) -> None:
    slot = bench.write(bench.grant("a"), 2)
    other = bench.write(bench.grant("b"), 2)
    bench.rewrite(slot, **lie)
    bench.serve(slot, other)
    assert (bench.result(slot).status, bench.result(slot).rows) == (status, 0)
    assert (bench.rows(other) == 8).all()


@given(
    st.binary(min_size=REQUEST_HEADER_BYTES, max_size=REQUEST_HEADER_BYTES),
    st.integers(0, REQUEST_HEADER_BYTES),
    st.booleans(),
)
def test_a_wild_header_writes_nothing_outside_its_slots_result(
    benches, native_kernel, noise: bytes, kept: int, is_compiled: bool
) -> None:
    """With the start kept, magic, version and generation pass, and the other fields are tested."""
    bench = benches(kernel=native_kernel if is_compiled else None)
    slot = bench.write(bench.grant("a", SLOTS), 2, slot=2)
    offset = bench.arena.request_offset(slot)
    bench.arena.buffer[offset + kept : offset + REQUEST_HEADER_BYTES] = noise[kept:]
    before = bench.arena.buffer[:]
    bench.step()
    after = bench.arena.buffer[:]
    first = bench.arena.result_offset(slot)
    last = first + RESULT_HEADER_BYTES + bench.arena.result_capacity
    flags = bench.arena.request_offset(0)
    assert before[flags:first] == after[flags:first]
    assert before[last:] == after[last:]
    assert bench.arena.flags.load(slot) == SlotState.DONE


def test_a_slot_without_an_owner_is_taken_offline(bench) -> None:
    assert bench.arena.client_write_done(3)
    bench.serve(3)
    assert bench.arena.flags.load(3) == SlotState.OFFLINE
    assert not bench.kernel.batches


def test_row_16_a_slot_handed_on_before_the_loop_marked_it_is_left_alone(bench) -> None:
    """Row 16: late reply after slot reuse (ABA): the loop saw WRITTEN, then the slot got another
    owner, who is writing.
    """
    old = bench.grant("a", SLOTS)
    slot = bench.write(old, 2)
    ready = [slot]
    bench.table.revoke(old.connection_id)
    new = bench.grant("b", SLOTS)
    bench.serve(*ready)
    assert bench.arena.flags.load(slot) == SlotState.FREE
    assert bench.loop.requests == 0
    bench.write(new, 3, request_id=9)
    bench.serve(slot)
    assert (bench.rows(slot) == 12).all()
    assert bench.result(slot).request_id == 9


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("moment", ["claim", "compute", "write_answer", "hand_over"])
def test_row_16_a_slot_revoked_while_it_is_computed_is_neither_answered_nor_handed_on(
    benches, native_kernel, moment: str, is_compiled: bool
) -> None:
    """Row 16: late reply after slot reuse (ABA): there is none while the loop works on the slot."""
    bench = benches(kernel=native_kernel if is_compiled else None)
    grant = bench.grant("a", SLOTS)
    slot = bench.write(grant, 2)
    granted: list[Grant | None] = []
    owner = bench.table.owner

    def revoke(now: str) -> None:
        if now == moment:
            bench.table.revoke(grant.connection_id)
            granted.append(bench.table.grant("b", 1, SLOTS))

    # Right after the claim, the loop asks for the owner.
    bench.table.owner = lambda slot: (revoke("claim"), owner(slot))[1]
    bench.watch(revoke)
    bench.serve(slot)
    assert granted == [None]
    assert bench.arena.flags.load(slot) == SlotState.OFFLINE
    assert bench.loop.in_flight == 0
    assert bench.table.grant("b", 1, SLOTS) is not None


def test_requests_written_during_a_batch_join_the_next(bench) -> None:
    grants = [bench.grant(name) for name in "abc"]
    bench.write(grants[0], 2, layer=2)
    bench.write(grants[1], 3, layer=1)

    def one_more() -> None:
        bench.kernel.on_call = lambda: None
        bench.write(grants[2], 5, layer=1)
        bench.write(grants[0], 7, layer=3, slot=grants[0].first_slot + 1)

    bench.kernel.on_call = one_more
    bench.step()
    assert bench.kernel.batches == [(2, 2)]
    assert bench.loop.in_flight == 1
    bench.step()
    assert bench.kernel.batches == [(2, 2), (1, 4)]
    assert bench.loop.in_flight == 1
    bench.step()
    assert bench.kernel.batches == [(2, 2), (1, 4), (3, 2)]
    assert bench.loop.in_flight == 0
    for slot, x in zip([0, 2, 4, 1], (2, 3, 5, 7), strict=True):
        assert (bench.rows(slot) == 4 * x).all()


def test_an_expired_request_is_not_computed(bench) -> None:
    grants = [bench.grant(name) for name in "abc"]
    bench.write(grants[0], 2, layer=0)
    bench.write(grants[1], 3, layer=1, budget_us=300_000)
    bench.write(grants[2], 5, layer=1, budget_us=400_000)

    def take_long() -> None:
        bench.now += 0.3

    bench.kernel.on_call = take_long
    bench.step()
    bench.step()
    assert bench.kernel.batches == [(0, 2), (1, 2)]
    expired = bench.result(2)
    assert (expired.status, expired.rows, expired.request_id) == (Status.EXPIRED, 0, 5)
    assert (bench.rows(4) == 20).all()
    loop = bench.loop
    assert (loop.computed, loop.expired, loop.refused, loop.requests) == (2, 1, 0, 3)


def test_a_request_that_is_revoked_before_its_turn_is_not_computed(bench) -> None:
    first, second = bench.grant("a"), bench.grant("b")
    bench.write(first, 2, layer=0)
    slot = bench.write(second, 3, layer=1)
    bench.kernel.on_call = lambda: bench.table.revoke(second.connection_id)
    bench.step()
    bench.step()
    assert bench.kernel.batches == [(0, 2)]
    assert bench.arena.flags.load(slot) == SlotState.OFFLINE
    assert (bench.loop.in_flight, bench.loop.requests) == (0, 1)
    assert bench.grant("c", 4).first_slot == 2


@pytest.fixture
def waiting(benches):
    """A bench whose next batch waits for the client "b": "a" has written again, for layer 1."""
    bench = benches("all", window_s=60.0)
    a, bench.b = bench.grant("a"), bench.grant("b")
    bench.write(a, 2)
    bench.write(bench.b, 3)
    bench.step()
    bench.write(a, 2, slot=a.first_slot + 1, layer=1)
    return bench


def test_a_batch_waits_at_most_for_the_window(waiting) -> None:
    slot = waiting.b.first_slot + 1
    late = threading.Timer(0.05, lambda: waiting.write(waiting.b, 3, slot=slot, layer=1))
    late.start()
    began = time.monotonic()
    waiting.step()
    assert 0.04 < time.monotonic() - began < 30
    late.join()
    waiting.step()
    assert waiting.kernel.batches == [(0, 4), (1, 4)]


def test_no_wait_for_a_gone_client(waiting) -> None:
    waiting.table.revoke(waiting.b.connection_id)
    waiting.step()
    assert waiting.kernel.batches == [(0, 4), (1, 2)]


def test_stop_ends_a_batchs_wait(waiting) -> None:
    waiting.now += 0.001
    thread = threading.Thread(target=waiting.loop.run)
    thread.start()
    while waiting.loop.in_flight == 0:
        time.sleep(0.001)
    waiting.loop.stop()
    thread.join(10)
    assert not thread.is_alive()
    assert waiting.kernel.batches == [(0, 4)]


def test_a_warm_loop_allocates_nothing(benches) -> None:
    """Neither views nor scratch memory are made again, and Python's own memory does not grow."""
    bench = benches("window", window_s=0.0)
    outs = {tokens: torch.zeros(tokens, HIDDEN) for tokens in range(1, 3 * TOKENS)}
    bench.loop._kernel = lambda x_TH, *_: outs[len(x_TH)]
    grants = [bench.grant(name) for name in "abc"]
    images = [
        [(grant, bytes(bench.image(grant, 2, tokens=1 + n % 3, layer=n % 2))) for grant in grants]
        for n in range(6)
    ]

    def calls(count: int) -> None:
        for n in range(count):
            for grant, image in images[n % len(images)][: 1 + n % 3]:
                bench.put(grant.first_slot, image)
                bench.arena.client_write_done(grant.first_slot)
            bench.loop.step(0)
            for grant in grants:
                bench.arena.client_free(grant.first_slot)

    def made() -> tuple[int, ...]:
        loop = bench.loop
        return loop._views.made, loop._scratch.made, loop._scratch.nbytes

    with torch.inference_mode():
        # Long enough to fill the interpreter's free lists (2,000 tuples of each length).
        calls(1500)
        before = made()
        tracemalloc.start()
        try:
            calls(50)
            start, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            calls(500)
            end, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert bench.loop.computed == sum(1 + n % 3 for n in (*range(1500), *range(50), *range(500)))
    assert made() == before
    assert end - start < 2048
    assert peak - start < 16384


LATENCY_S = 0.0105  # Ten rounds and a half of a millisecond.


@pytest.fixture
def far(benches):
    return benches(latency_s=LATENCY_S)


def test_a_request_is_seen_after_the_delay(far) -> None:
    slot = far.write(far.grant("a"), 2)
    for _ in range(11):  # The first round sees it written.
        assert far.arena.flags.load(slot) == SlotState.WRITTEN
        assert not far.kernel.batches
        far.step()
    assert far.loop.in_flight == 1
    far.step()
    assert (far.rows(slot) == 8).all()
    assert far.result(slot).service_us < 1000, "the delay is not the server's time"
    assert far.loop.in_flight == 0


def test_delays_overlap(far) -> None:
    """Delays overlap: two requests take as long as one."""
    first = far.write(far.grant("a"), 2, layer=0)
    for _ in range(5):
        far.step()
    second = far.write(far.grant("b"), 3, layer=2)
    for _ in range(7):
        far.step()
    assert far.kernel.batches == [(0, 2)]
    assert (far.rows(first) == 8).all()
    for _ in range(5):
        far.step()
    assert far.kernel.batches == [(0, 2), (2, 2)]
    assert (far.rows(second) == 12).all()


def test_the_budget_includes_the_delay(far) -> None:
    far.write(far.grant("a"), 2, budget_us=5_000)
    for _ in range(12):
        far.step()
    assert (far.loop.expired, far.loop.computed) == (1, 0)


def test_a_client_that_leaves_during_the_delay(far) -> None:
    """Its slot goes to another client, whose request is answered instead of the old one."""
    grant = far.grant("a", slots=far.slots)
    far.write(grant, 2)
    far.step()
    far.table.revoke(grant.connection_id)
    for _ in range(12):
        if far.loop.in_flight:
            far.step()
    assert not far.kernel.batches
    assert far.loop.in_flight == 0
    heir = far.grant("b", slots=far.slots)
    slot = far.write(heir, 5)
    for _ in range(12):
        far.step()
    assert (far.rows(slot) == 20).all()
