"""The loop, one round at a time: the test is the client, and there are no threads."""

from __future__ import annotations

import errno

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eaas.types import ModelShape
from eaas.wire import Arena, RequestHeader, ResultHeader, SlotState
from eaas.wire.header import (
    REQUEST_HEADER_BYTES,
    RESULT_HEADER_BYTES,
    Status,
    WireDtype,
    payload_layout,
    result_length,
)
from eaas.wire.slot import request_views, result_view
from expert_server.loop import ServeLoop
from expert_server.slots import Grant, SlotTable

HIDDEN, TOP_K, EXPERTS, TOKENS, SLOTS = 8, 2, 4, 4, 6
SHAPE = ModelShape("tiny", EXPERTS, HIDDEN, TOP_K, ("layer.0", "layer.1"), "float32", "digest")


class Kernel:
    """Each expert multiplies by its number and the layer's."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, int]] = []
        self.breaks_with: Exception = RuntimeError("the kernel broke")

    def __call__(self, x_TH, ids_TK, scores_TK, layer) -> torch.Tensor:
        self.batches.append((layer, len(x_TH)))
        if (ids_TK >= EXPERTS).any():
            raise LookupError("not here")
        if layer == 1 and (x_TH == 13).any():
            raise self.breaks_with
        return x_TH.float() * (scores_TK * (ids_TK + 1) * (ids_TK >= 0)).sum(1, keepdim=True)


class Bench:
    """An arena, its table and its loop."""

    def __init__(self) -> None:
        total = payload_layout(TOKENS, HIDDEN, TOP_K, WireDtype.FLOAT32).total
        self.arena = Arena.create_local(SLOTS, total, result_length(TOKENS, HIDDEN), 1)
        self.table = SlotTable(self.arena)
        self.kernel = Kernel()
        self.loop = ServeLoop(self.arena, self.table, self.kernel, SHAPE, 0)
        self.loop.epoch = 42

    def grant(self, client: str, slots: int = 2) -> Grant:
        grant = self.table.grant(client, 1, slots)
        assert grant is not None
        return grant

    def write(
        self, grant: Grant, x: float, expert: int = 1, *, tokens: int = 2, layer: int = 0,
        slot: int | None = None, request_id: int = 5, dtype: WireDtype = WireDtype.FLOAT32,
        budget_us: int = 1_000_000,
    ) -> int:  # fmt: skip
        slot = grant.first_slot if slot is None else slot
        header = RequestHeader.of(
            dtype=dtype,
            generation=grant.generation,
            request_id=request_id,
            epoch=1,
            budget_us=budget_us,
            layer=layer,
            batch_size=tokens,
            hidden_size=HIDDEN,
            top_k=TOP_K,
        )
        offset = self.arena.request_offset(slot)
        x_TH, ids_TK, scores_TK = request_views(self.arena.buffer, offset, header)
        x_TH[...] = x
        ids_TK[...] = expert
        scores_TK[...] = 1
        header.pack_into(self.arena.buffer, offset)
        assert self.arena.client_write_done(slot)
        return slot

    def rewrite(self, slot: int, **changes: int) -> None:
        """Lie in the header that stands in a slot."""
        offset = self.arena.request_offset(slot)
        header = RequestHeader.unpack_from(self.arena.buffer, offset)
        header._replace(**changes).pack_into(self.arena.buffer, offset)

    def serve(self, *slots: int) -> None:
        with torch.inference_mode():
            self.loop.serve(list(slots))

    def result(self, slot: int) -> ResultHeader:
        assert self.arena.flags.load(slot) == SlotState.DONE
        return ResultHeader.unpack_from(self.arena.buffer, self.arena.result_offset(slot))

    def rows(self, slot: int) -> np.ndarray:
        header = self.result(slot)
        assert header.status == Status.OK
        offset = self.arena.result_offset(slot)
        return result_view(self.arena.buffer, offset, header.rows, HIDDEN).copy()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_one_batch_per_layer_and_each_client_its_rows(bench: Bench) -> None:
    grants = [bench.grant(name) for name in "abc"]
    slots = [
        bench.write(grant, x, layer=layer, tokens=tokens)
        for grant, x, layer, tokens in zip(grants, (2, 3, 5), (0, 1, 0), (1, 2, 4), strict=True)
    ]
    bench.serve(*slots)
    assert sorted(bench.kernel.batches) == [(0, 5), (1, 2)]
    for slot, x, tokens in zip(slots, (2, 3, 5), (1, 2, 4), strict=True):
        assert (bench.rows(slot) == np.full((tokens, HIDDEN), x * 2 * TOP_K)).all()


def test_the_unknown_expert_of_one_is_not_the_others_fault(bench: Bench) -> None:
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
def test_a_broken_kernel_refuses_its_batch_and_the_loop_goes_on(
    bench: Bench, error: Exception
) -> None:
    bench.kernel.breaks_with = error
    slot = bench.write(bench.grant("a"), 13, layer=1)
    other = bench.write(bench.grant("b"), 2)
    bench.serve(slot, other)
    assert bench.result(slot).status == Status.INTERNAL
    assert (bench.rows(other) == 8).all()


def test_nan_of_one_client_stays_there(bench: Bench) -> None:
    slots = [bench.write(bench.grant("a"), np.nan), bench.write(bench.grant("b"), 2)]
    bench.serve(*slots)
    assert np.isnan(bench.rows(slots[0])).all()
    assert (bench.rows(slots[1]) == 8).all()


@pytest.mark.parametrize(
    ("lie", "status"),
    [
        ({"hidden_size": 4}, Status.INVALID_ARGUMENT),
        ({"dtype": 9}, Status.INVALID_ARGUMENT),
        ({"layer": 2}, Status.INVALID_ARGUMENT),
        ({"batch_size": 0}, Status.INVALID_ARGUMENT),
        ({"magic": 1}, Status.INTERNAL),
        ({"version": 9}, Status.INTERNAL),
        ({"generation": 999}, Status.INTERNAL),
        ({"payload_length": 1}, Status.INTERNAL),
        ({"batch_size": 2**32 - 1}, Status.INTERNAL),
        ({"top_k": 2**32 - 1}, Status.INTERNAL),
    ],
)
def test_a_lie_is_refused_with_the_status_that_fits(bench: Bench, lie, status) -> None:
    slot = bench.write(bench.grant("a"), 2)
    other = bench.write(bench.grant("b"), 2)
    bench.rewrite(slot, **lie)
    bench.serve(slot, other)
    assert (bench.result(slot).status, bench.result(slot).rows) == (status, 0)
    assert (bench.rows(other) == 8).all()


def test_a_forged_batch_larger_than_a_slot_is_refused(bench: Bench) -> None:
    slot = bench.write(bench.grant("a"), 2)
    total = payload_layout(TOKENS + 1, HIDDEN, TOP_K, WireDtype.FLOAT32).total
    bench.rewrite(slot, batch_size=TOKENS + 1, payload_length=total)
    bench.serve(slot)
    assert bench.result(slot).status == Status.INTERNAL


@given(st.binary(min_size=REQUEST_HEADER_BYTES, max_size=REQUEST_HEADER_BYTES), st.booleans())
def test_a_wild_header_writes_nothing_outside_its_slots_result(
    noise: bytes, keep_start: bool
) -> None:
    bench = Bench()
    slot = bench.write(bench.grant("a", SLOTS), 2, slot=2)
    offset = bench.arena.request_offset(slot)
    # With the start kept, magic, version and generation pass, and the rest is put to the test.
    start = 16 if keep_start else 0
    bench.arena.buffer[offset + start : offset + REQUEST_HEADER_BYTES] = noise[start:]
    before = bench.arena.buffer[:]
    bench.serve(slot)
    after = bench.arena.buffer[:]
    first = bench.arena.result_offset(slot)
    last = first + RESULT_HEADER_BYTES + bench.arena.result_capacity
    flags = bench.arena.request_offset(0)
    assert before[flags:first] == after[flags:first]
    assert before[last:] == after[last:]
    assert bench.arena.flags.load(slot) == SlotState.DONE


def test_a_slot_without_an_owner_is_taken_offline(bench: Bench) -> None:
    assert bench.arena.client_write_done(3)
    bench.serve(3)
    assert bench.arena.flags.load(3) == SlotState.OFFLINE
    assert not bench.kernel.batches


def test_a_slot_handed_on_before_the_loop_marked_it_is_left_alone(bench: Bench) -> None:
    """Late reply after slot reuse: the loop saw WRITTEN, then the slot got another owner, who is writing."""
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


def test_a_slot_revoked_while_it_is_computed_is_neither_answered_nor_handed_on(
    bench: Bench,
) -> None:
    grant = bench.grant("a", SLOTS)
    slot = bench.write(grant, 2)
    compute = bench.kernel.__call__
    granted: list[Grant | None] = []

    def revoking(*args) -> torch.Tensor:
        bench.table.revoke(grant.connection_id)
        granted.append(bench.table.grant("b", 1, SLOTS))
        return compute(*args)

    bench.loop._kernel = revoking
    bench.serve(slot)
    assert granted == [None]
    assert bench.arena.flags.load(slot) == SlotState.OFFLINE
    assert bench.table.grant("b", 1, SLOTS) is not None
    assert bench.arena.flags.load(slot) == SlotState.FREE
