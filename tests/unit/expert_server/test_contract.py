"""Rows of the fault contract that the server's loop answers for, each quoted by its test.

The client is the test: it reads and writes slots with the same checks as the real one (`Bench.take`).
"""

import itertools
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaas.errors import SlotCorruptError
from eaas.wire import RequestHeader, SlotState
from eaas.wire.slot import REQUEST_HEADER_BYTES, Status, WireDtype, seal
from expert_server.loop import slots


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the loop's waits for late data; no time passes."""
    calls: list[int] = []
    monkeypatch.setattr(slots, "_settle", lambda: calls.append(1))
    return calls


# -- row 15 ---------------------------------------------------------------------------------------


def test_row_15_a_writer_that_dies_at_any_byte_is_never_consumed(bench) -> None:
    """Row 15: writer dies at each byte of a slot write: never consumed; slot reclaimed."""
    whole = len(bench.image(bench.grant("writer"), 3))
    # In a client's order: the payload, then the header.
    order = [*range(REQUEST_HEADER_BYTES, whole), *range(REQUEST_HEADER_BYTES)]
    for died_at in range(whole + 1):
        grant = bench.grant("writer", incarnation=died_at + 2)
        slot, image = grant.first_slot, bench.image(grant, 3)
        for place in order[:died_at]:
            bench.put(slot, image[place : place + 1], start=place)
        assert bench.written() == []
        # The loop does not check this slot when the flag of another one wakes it.
        other = bench.write(bench.grant("other", incarnation=died_at + 1), 5)
        bench.step()
        assert (bench.rows(other) == 20).all()
        assert bench.table.revoke_incarnations("writer", died_at + 2) == 1
        assert bench.arena.flags.load(slot) == SlotState.OFFLINE
    assert bench.loop.requests == whole + 1
    # Remains of the dead client do not affect the next owner's request.
    grant = bench.grant("writer", incarnation=whole + 9)
    slot = bench.write(grant, 7, tokens=1)
    bench.step()
    assert (bench.take(grant, slot, tokens=1)[1] == 28).all()


class _Death(BaseException):
    """The process dies."""


@pytest.mark.parametrize("checksum", [False, True])
def test_row_15_a_server_that_dies_at_any_step_leaves_a_right_answer_or_none(
    benches, monkeypatch: pytest.MonkeyPatch, checksum: bool
) -> None:
    """Row 15, the other way: the server dies at each step of its work on a request. The client
    takes the right answer, or none, and is served by the restarted server.
    """
    answers = 0
    for steps in range(100):
        bench = benches()
        grant = bench.grant("a")
        slot = bench.write(grant, 3, checksum=checksum)
        left = iter(range(steps))

        def die_or_go_on(_step: str = "", left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise _Death

        bench.kernel.on_call = die_or_go_on
        bench.watch(die_or_go_on)
        with monkeypatch.context() as patched:
            patched.setattr(slots, "seal", lambda *args, go=die_or_go_on: (go(), seal(*args)))
            try:
                bench.step()
            except _Death:
                pass
            else:
                assert answers
                return
        if bench.arena.flags.load(slot) == SlotState.DONE:
            answers += 1
            status, rows_TH = bench.take(grant, slot, checksum=checksum)
            assert status is Status.OK
            assert (rows_TH == 12).all()
        else:
            assert bench.arena.flags.load(slot) == SlotState.WRITTEN
        # Memory of a dead server is not used again: a restarted server has a new arena.
        after = benches()
        grant = after.grant("a")
        slot = after.write(grant, 3, checksum=checksum)
        after.step()
        assert (after.take(grant, slot, checksum=checksum)[1] == 12).all()
    pytest.fail("the loop never came to its end")


# -- row 16 ---------------------------------------------------------------------------------------


def test_row_16_what_a_former_owner_writes_is_refused_by_its_generation(bench, settled) -> None:
    """Row 16: late reply after slot reuse (ABA): generation and request id mismatch: discarded,
    counted. Here: a client that slept through the loss of its slots writes into another's.
    """
    old = bench.grant("a")
    image = bench.image(old, 3)
    bench.table.revoke(old.connection_id)
    new = bench.grant("b")
    assert new.first_slot == old.first_slot
    bench.put(new.first_slot, image)
    assert bench.arena.client_write_done(new.first_slot)
    bench.step()
    assert bench.kernel.batches == []
    assert bench.loop.refused == 1
    # b has sent no request: its request id refuses the old answer, too.
    with pytest.raises(SlotCorruptError, match="request_id=5"):
        bench.take(new, new.first_slot, request_id=6)
    slot = bench.write(new, 3, request_id=7)
    bench.step()
    assert (bench.take(new, slot, request_id=7)[1] == 12).all()


def test_row_16_an_answer_to_the_former_owner_is_none_to_the_next(bench) -> None:
    """Row 16: late reply after slot reuse (ABA): generation and request id mismatch: discarded."""
    old = bench.grant("a")
    slot = bench.write(old, 3, request_id=5)
    bench.step()
    offset = bench.arena.result_offset(slot)
    late = bench.arena.buffer[offset : offset + 64 + bench.arena.result_capacity]
    bench.table.revoke(old.connection_id)
    new = bench.grant("b")
    assert bench.write(new, 7, request_id=5) == slot
    # The former owner's answer arrives now, from a server that checks nothing.
    bench.arena.buffer[offset : offset + len(late)] = late
    assert bench.arena.server_done(slot)
    with pytest.raises(SlotCorruptError, match="generation"):
        bench.take(new, slot, request_id=5)


# -- row 17 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("comes", [True, False], ids=["late", "never"])
def test_row_17_data_behind_its_flag_is_waited_for_once(bench, monkeypatch, comes) -> None:
    """Row 17: flag visible before data: with the checksum on it is caught, re-read, then
    quarantined (by the client, on INTERNAL).
    """
    grant = bench.grant("a", 1)
    slot = grant.first_slot
    whole = len(bench.image(grant, 3))
    last = bench.image(grant, 2, expert=2, request_id=1, checksum=True, layer=1)
    for request_id, there in enumerate(range(0, whole, 5), 2):
        image = bench.image(grant, 3, request_id=request_id, checksum=True)
        # Bytes of the previous request remain.
        found = image[:there] + last[there:]
        bench.put(slot, found)
        settled: list[int] = []

        def settle(image: bytes = image, settled: list[int] = settled) -> None:
            settled.append(1)
            if comes:
                bench.put(slot, image)

        monkeypatch.setattr(slots, "_settle", settle)
        assert bench.arena.client_write_done(slot)
        refused = bench.loop.refused
        bench.step()
        assert len(settled) == (found not in (image, last))
        if found == last:
            # None of it was there, so the previous request was complete: its request id reveals it.
            with pytest.raises(SlotCorruptError, match="request_id=1"):
                bench.take(grant, slot, request_id=request_id, checksum=True)
        elif comes or found == image:
            status, rows_TH = bench.take(grant, slot, request_id=request_id, checksum=True)
            assert status is Status.OK
            assert (rows_TH == 12).all()
        else:
            assert bench.loop.refused == refused + 1
            assert bench.result(slot).status == Status.INTERNAL
            assert bench.arena.client_free(slot)


# -- row 18 ---------------------------------------------------------------------------------------


def test_row_18_every_single_bit_flip_of_a_request_is_refused_and_not_held_against_it(
    bench, settled
) -> None:
    """Row 18: single bit flips in a slot: with the checksum on, 100 % detected; typed error; retried
    elsewhere. INTERNAL is retried; INVALID_ARGUMENT would not be.
    """
    grant = bench.grant("a")
    slot = grant.first_slot
    image = bench.image(grant, 3, checksum=True)
    for bit in range(8 * len(image)):
        flipped = bytearray(image)
        flipped[bit // 8] ^= 1 << bit % 8
        bench.put(slot, flipped)
        assert bench.arena.client_write_done(slot)
        bench.step()
        assert bench.result(slot).status == Status.INTERNAL, bit
        assert bench.arena.client_free(slot)
    assert bench.kernel.batches == []
    assert bench.loop.refused == len(settled) == 8 * len(image)
    bench.put(slot, image)
    assert bench.arena.client_write_done(slot)
    bench.step()
    assert (bench.take(grant, slot, checksum=True)[1] == 12).all()


@pytest.mark.parametrize("expert", [1, 4], ids=["result", "refusal"])
def test_row_18_every_single_bit_flip_of_an_answer_is_found(bench, expert: int) -> None:
    """Row 18: single bit flips in a slot: with the checksum on, 100 % detected; typed error."""
    grant = bench.grant("a")
    slot = bench.write(grant, 3, expert, checksum=True)
    bench.step()
    offset, end = bench.arena.result_offset(slot), bench.result(slot).end
    assert end == 64 + (2 * bench.hidden * 4 if expert == 1 else 0)
    for bit in range(8 * end):
        bench.arena.buffer[offset + bit // 8] ^= 1 << bit % 8
        with pytest.raises(SlotCorruptError):
            bench.take(grant, slot, checksum=True)
        bench.arena.buffer[offset + bit // 8] ^= 1 << bit % 8
        bench.arena.flags.exchange(slot, SlotState.DONE)
    wanted = Status.OK if expert == 1 else Status.STALE_PLACEMENT
    assert bench.take(grant, slot, checksum=True)[0] is wanted


# -- row 19 ---------------------------------------------------------------------------------------

WIDTHS = {
    "magic": 32, "version": 16, "dtype": 8, "flags": 8, "generation": 32, "checksum": 32,
    "request_id": 64, "epoch": 64, "payload_length": 64, "budget_us": 64, "layer": 32,
    "batch_size": 32, "hidden_size": 32, "top_k": 32,
}  # fmt: skip
HARMLESS = {"request_id", "epoch", "budget_us", "layer"}
ENDS = list(itertools.accumulate(width // 8 for width in WIDTHS.values()))
PLACES = dict(zip(WIDTHS, itertools.pairwise([0, *ENDS]), strict=True))
LIES = st.sampled_from(sorted(WIDTHS)).flatmap(
    lambda field: st.tuples(
        st.just(field),
        st.one_of(
            st.integers(0, 2 ** WIDTHS[field] - 1),
            st.integers(0, 8),
            st.integers(2 ** WIDTHS[field] - 4, 2 ** WIDTHS[field] - 1),
        ),
    )
)


@given(st.lists(LIES, min_size=1, max_size=3))
def test_row_19_a_lying_header_is_refused_before_any_view_is_made(benches, lies) -> None:
    """Row 19: lying header: lengths, dtype, layer, counts: refused before any view is made; no
    over-allocation.
    """
    bench = benches()
    grant = bench.grant("a")
    slot = bench.write(grant, 3)
    told = bench.arena.request_offset(slot)
    before = bytes(bench.arena.buffer[told : told + REQUEST_HEADER_BYTES])
    bench.rewrite(slot, **dict(lies))
    after = bytes(bench.arena.buffer[told : told + REQUEST_HEADER_BYTES])
    tracemalloc.start()
    try:
        bench.step()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000
    answered = bench.result(slot)
    if answered.status in (Status.INTERNAL, Status.INVALID_ARGUMENT):
        assert bench.loop._views.made == 0
        assert bench.kernel.batches == []
        assert (answered.rows, answered.length) == (0, 0)
    else:
        # The change was harmless: the payload was computed.
        lied = {field for field, _ in lies} - HARMLESS
        assert (
            before == after or not lied or answered.status == Status.EXPIRED or _same(before, after)
        )
        assert answered.status in (Status.OK, Status.EXPIRED)


def _same(before: bytes, after: bytes) -> bool:
    return before[32:40] == after[32:40] and before[52:64] == after[52:64]


@pytest.mark.parametrize("is_compiled", [False, True])
def test_row_19_only_what_was_checked_is_believed(
    benches, native_kernel, is_compiled: bool
) -> None:
    """Row 19: lying header: refused before any view is made. A client that changes the header after it
    was checked is answered by what was checked.
    """
    bench = benches(kernel=native_kernel if is_compiled else None)
    grant = bench.grant("a")
    slot = bench.write(grant, 3, tokens=1)

    def change(verb: str) -> None:
        if verb != "accept":
            bench.rewrite(slot, batch_size=2**31, hidden_size=2**31, top_k=2**31, request_id=9)

    bench.watch(change)
    bench.step()
    assert (bench.take(grant, slot, tokens=1)[1] == 12).all()


# -- row 23 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [1, 2, 1000, 2**31])
@pytest.mark.parametrize("consistent", [True, False])
def test_row_23_a_forged_batch_is_refused(bench, more: int, consistent: bool) -> None:
    """Row 23: a batch larger than a slot: a forged one is refused. (Its header claims more than the slot
    holds: only the number of tokens, or also a matching payload length.)
    """
    liar, other = bench.grant("liar"), bench.grant("other")
    slot = bench.write(liar, 3)
    tokens = bench.tokens + more
    if consistent:
        forged = RequestHeader.of(
            dtype=WireDtype.FLOAT32, generation=liar.generation, request_id=5, epoch=1,
            budget_us=1_000_000, layer=0, batch_size=tokens, hidden_size=bench.hidden,
            top_k=bench.top_k, flags=0,
        )  # fmt: skip
        forged.pack_into(bench.arena.buffer, bench.arena.request_offset(slot))
    else:
        bench.rewrite(slot, batch_size=tokens)
    before = bytes(bench.arena.buffer)
    bench.step()
    assert bench.result(slot).status in (Status.INVALID_ARGUMENT, Status.INTERNAL)
    assert (bench.result(slot).rows, bench.result(slot).length) == (0, 0)
    assert (bench.loop.refused, bench.loop._views.made, bench.kernel.batches) == (1, 0, [])
    start, end = bench.arena.request_offset(slot), bench.arena.result_offset(slot)
    assert bench.arena.buffer[start:end] == before[start:end]
    # The others go on.
    honest = bench.write(other, 7)
    bench.step()
    assert (bench.take(other, honest)[1] == 28).all()


# -- row 25 ---------------------------------------------------------------------------------------


def test_row_25_a_request_replayed_or_doubled_gets_the_same_answer(bench) -> None:
    """Row 25: a request replayed or doubled: data path: same answer, used once."""
    grant = bench.grant("a")
    first, second = grant.first_slot, grant.first_slot + 1
    bench.write(grant, np.pi, slot=first)
    bench.write(grant, np.pi, slot=second)
    bench.step()
    _, rows_TH = bench.take(grant, first)
    assert rows_TH.tobytes() == bench.take(grant, second)[1].tobytes()
    # The same answer again, after the client went on to the next request: not used.
    assert bench.arena.client_write_done(first)
    bench.step()
    assert bench.rows(first).tobytes() == rows_TH.tobytes()
    with pytest.raises(SlotCorruptError, match="request_id=5"):
        bench.take(grant, first, request_id=6)
