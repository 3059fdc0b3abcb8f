"""The verbs on a client's slots, one request at a time, with the test as the server."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_client.exchange import AWAITED, CAME, REVOKED, WRONG, Slots
from eaas.wire import Arena, RequestHeader, ResultHeader, SlotState
from eaas.wire.header import max_tokens, payload_layout, result_length
from eaas.wire.slot import (
    CHECKSUM_FLAG,
    DOORBELL,
    Status,
    WireDtype,
    reply_doorbell,
    request_views,
)

GENERATION, SLOT = 5, 1


class Bench:
    """Two slots of three, with room for requests of so many tokens."""

    def __init__(self, tokens: int = 4, hidden: int = 8, top_k: int = 2) -> None:
        self.tokens, self.hidden, self.top_k = tokens, hidden, top_k
        payload = payload_layout(tokens, hidden, top_k, WireDtype.FLOAT32).total
        self.arena = Arena.create_local(3, payload, result_length(tokens, hidden), 1)
        for slot in range(3):
            self.arena.set_generation(slot, GENERATION)
        self.slots = Slots(
            self.arena.buffer,
            *self.arena.offsets,
            self.arena.request_stride,
            self.arena.result_stride,
            1,
            2,
            self.arena.payload_capacity,
            self.arena.result_capacity,
            reply_doorbell(1),
            DOORBELL,
            GENERATION,
            hidden,
            True,
        )

    def write(self, slot: int = SLOT, **changes: Any) -> bool:
        """A request of all tokens, with other arguments where a test wants them."""
        request: dict[str, Any] = {
            "request_id": 9,
            "flags": 0,
            "budget_us": 1000,
            "epoch": 3,
            "layer": 2,
            "dtype": WireDtype.FLOAT32,
            "x": np.arange(self.tokens * self.hidden, dtype=np.float32).reshape(-1, self.hidden),
            "scores": np.ones((self.tokens, self.top_k), np.float32),
            "top_k": self.top_k,
            "rows": np.arange(self.tokens),
            "ids": np.zeros((self.tokens, self.top_k), np.int32),
        }
        return self.slots.write(slot, *(request | changes).values())

    def flag(self, slot: int = SLOT) -> int:
        return self.arena.flags.load(slot)

    def answer(self, **changes: Any) -> None:
        fields = {
            "status": Status.OK,
            "generation": GENERATION,
            "request_id": 9,
            "rows": self.tokens,
            "hidden_size": self.hidden,
        }
        header = ResultHeader.of(**(fields | changes))
        header.pack_into(self.arena.buffer, self.arena.result_offset(SLOT))
        assert self.arena.server_done(SLOT)


@given(st.data())
def test_a_request_arrives_as_it_was_given(data: st.DataObject) -> None:
    tokens, hidden, top_k = (data.draw(st.integers(1, most)) for most in (9, 40, 5))
    dtype = data.draw(st.sampled_from(list(WireDtype)))
    rows_R = np.array(
        sorted(data.draw(st.sets(st.integers(0, tokens - 1), min_size=1))), dtype=np.int64
    )
    dice = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    x_TH = dice.integers(0, 1000, (tokens, hidden)).astype(dtype.numpy_dtype)
    scores_TK = dice.random((tokens, top_k), np.float32)
    ids_RK = dice.integers(-1, 99, (len(rows_R), top_k), np.int32)
    bench = Bench(tokens, hidden, top_k)
    assert bench.write(
        request_id=2**63 + 1,
        flags=CHECKSUM_FLAG,
        dtype=dtype,
        x=x_TH,
        scores=scores_TK,
        rows=rows_R,
        ids=ids_RK,
    )
    assert bench.flag() == SlotState.FREE
    offset = bench.arena.request_offset(SLOT)
    header = RequestHeader.unpack_from(bench.arena.buffer, offset)
    assert header == RequestHeader.of(
        dtype=dtype,
        generation=GENERATION,
        request_id=2**63 + 1,
        epoch=3,
        budget_us=1000,
        layer=2,
        batch_size=len(rows_R),
        hidden_size=hidden,
        top_k=top_k,
        flags=CHECKSUM_FLAG,
    )
    found = request_views(bench.arena.buffer, offset, header)
    np.testing.assert_array_equal(found[0], x_TH[rows_R])
    np.testing.assert_array_equal(found[1], ids_RK)
    np.testing.assert_array_equal(found[2], scores_TK[rows_R])


def test_a_slot_goes_round() -> None:
    bench = Bench()
    slots = bench.slots
    assert bench.write()
    assert slots.hand_over(SLOT)
    assert bench.flag() == SlotState.WRITTEN
    assert not slots.hand_over(SLOT)
    assert slots.answer_of(SLOT, 9, 4)[0] == AWAITED
    assert not slots.free(SLOT)
    bench.answer(service_us=7)
    state, header, _ = slots.answer_of(SLOT, 9, 4)
    assert state == CAME
    assert ResultHeader.unpack_from(header, 0).service_us == 7
    assert slots.free(SLOT)
    assert bench.flag() == SlotState.FREE


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ({"request_id": 8}, "request id"),
        ({"generation": 4}, "generation"),
        ({"rows": 1}, "rows or hidden size"),
        ({"status": Status.EXPIRED}, "rows or hidden size"),
    ],
)
def test_a_wrong_answer_is_none(lie: dict[str, Any], words: str) -> None:
    bench = Bench()
    assert bench.write()
    assert bench.slots.hand_over(SLOT)
    bench.answer(**lie)
    assert bench.slots.answer_of(SLOT, 9, 4) == (WRONG, b"", words)


@pytest.mark.parametrize("answered", [False, True])
def test_a_slot_that_was_granted_to_another_is_left_alone(answered: bool) -> None:
    bench = Bench()
    assert bench.write()
    assert bench.slots.hand_over(SLOT)
    if answered:
        bench.answer()
    bench.arena.set_generation(SLOT, GENERATION + 1)
    before = bytes(bench.arena.buffer)
    assert bench.slots.answer_of(SLOT, 9, 4)[0] == REVOKED
    assert not bench.slots.free(SLOT)
    assert not bench.write(x=np.full((4, 8), 7, np.float32))
    assert bytes(bench.arena.buffer) == before


def test_a_slot_that_the_server_took_back_is_revoked() -> None:
    bench = Bench()
    assert bench.write()
    assert bench.slots.hand_over(SLOT)
    bench.arena.server_offline(SLOT)
    assert bench.slots.answer_of(SLOT, 9, 4)[0] == REVOKED
    assert not bench.slots.free(SLOT)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"slot": 0}, "slot 0 is not one of 1 to 3"),
        ({"slot": 3}, "slot 3 is not one of 1 to 3"),
        ({"dtype": 3}, "x: "),
        ({"top_k": 0}, "out of range"),
        ({"rows": np.array([0, 1, 2, 4])}, "does not fit"),
        ({"rows": np.array([-1, 1, 2, 3])}, "does not fit"),
        ({"rows": np.array([], np.int64), "ids": np.zeros((0, 2), np.int32)}, "does not fit"),
        ({"rows": np.arange(5) % 4, "ids": np.zeros((5, 2), np.int32)}, "does not fit"),
        ({"ids": np.zeros((3, 2), np.int32)}, "ids: "),
        ({"scores": np.ones((4, 3), np.float32)}, "scores: "),
        ({"x": np.ones((4, 7), np.float32)}, "."),
    ],
)
def test_a_request_that_does_not_fit_is_refused(changes: dict[str, Any], words: str) -> None:
    bench = Bench()
    before = bytes(bench.arena.buffer)
    with pytest.raises(ValueError, match=words):
        bench.write(**changes)
    assert bytes(bench.arena.buffer) == before
    assert (
        max_tokens(
            bench.arena.payload_capacity, bench.arena.result_capacity, 8, 2, WireDtype.FLOAT32
        )
        == 4
    )


def test_released_slots_are_refused() -> None:
    bench = Bench()
    bench.slots.release()
    with pytest.raises(ValueError, match="released"):
        bench.write()
    with pytest.raises(ValueError, match="released"):
        bench.slots.answer_of(SLOT, 9, 4)
