"""Slot states: the transitions, and an arena whose client or server dies at any step."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from answer_headers import validate_result
from eaas.wire import Arena, RequestHeader, ResultHeader, SlotState, _protocol
from eaas.wire.slot import (
    CHECKSUM_FLAG,
    SlotLimits,
    Status,
    WireDtype,
    request_views,
    result_view,
    seal,
    validate_request,
    verify,
)

F, W, D, X = SlotState.FREE, SlotState.WRITTEN, SlotState.DONE, SlotState.OFFLINE
TOKENS, HIDDEN, TOP_K = 2, 8, 2


@pytest.mark.parametrize(
    ("method", "moves"),
    [
        ("client_write_done", {F: W}),
        ("client_free", {D: F}),
        ("server_done", {W: D}),
        ("server_offline", {F: X, W: X, D: X}),
        ("server_reclaim", {X: F}),
    ],
)
def test_an_arena_allows_only_the_documented_transitions(
    method: str, moves: dict[SlotState, SlotState]
) -> None:
    arena = Arena.create_local(1, 64, 64, 1)
    for before in SlotState:
        arena.flags.exchange(0, before)
        assert getattr(arena, method)(0) == (before in moves)
        assert arena.flags.load(0) == moves.get(before, before)
    arena.close()


class SlotLife(RuleBasedStateMachine):
    """One slot, stepwise: a client writes piece by piece and may die after any; so may the next.

    What must hold (faults 13, 15, 16): a request is computed only if it was written as a whole by
    the connection that has the slot, and an answer is taken only by who asked for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena.create_local(1, 512, 256, 1)
        self.arena.set_generation(0, 1)
        self.client_generation = 1
        self.request_id = 0
        self.value = 0.0
        self.steps_written = 0
        self.client_lives = True
        self.accepted: RequestHeader | None = None
        self.computed_value = 0.0

    def teardown(self) -> None:
        self.arena.close()

    # -- the client: four steps, each of which may be its last

    def header(self) -> RequestHeader:
        return RequestHeader.of(
            dtype=WireDtype.FLOAT32,
            generation=self.client_generation,
            request_id=self.request_id,
            epoch=1,
            budget_us=1,
            layer=0,
            batch_size=TOKENS,
            hidden_size=HIDDEN,
            top_k=TOP_K,
            flags=CHECKSUM_FLAG,
        )

    def client_owns_the_slot(self) -> bool:
        return self.client_lives and self.arena.flags.load(0) == SlotState.FREE

    @precondition(client_owns_the_slot)
    @rule(value=st.floats(1, 100, width=32))
    def client_writes_hidden_states(self, value: float) -> None:
        self.request_id += 1
        self.value = value
        offset = self.arena.request_offset(0)
        request_views(self.arena.buffer, offset, self.header())[0][...] = value
        self.steps_written = 1

    @precondition(lambda self: self.client_owns_the_slot() and self.steps_written == 1)
    @rule()
    def client_writes_ids_and_scores(self) -> None:
        offset = self.arena.request_offset(0)
        _, ids_TK, scores_TK = request_views(self.arena.buffer, offset, self.header())
        ids_TK[...] = self.request_id
        scores_TK[...] = self.value
        self.steps_written = 2

    @precondition(lambda self: self.client_owns_the_slot() and self.steps_written == 2)
    @rule()
    def client_writes_header(self) -> None:
        seal(self.arena.buffer, self.arena.request_offset(0), self.header())
        self.steps_written = 3

    @precondition(lambda self: self.client_owns_the_slot() and self.steps_written == 3)
    @rule()
    def client_sets_flag(self) -> None:
        assert self.arena.client_write_done(0)
        self.steps_written = 4

    @precondition(lambda self: self.client_lives)
    @rule()
    def client_dies(self) -> None:
        self.client_lives = False

    @precondition(lambda self: self.client_lives)
    @rule()
    def client_reads(self) -> None:
        if self.arena.flags.load(0) != SlotState.DONE:
            return
        assert self.steps_written == 4
        offset = self.arena.result_offset(0)
        header = ResultHeader.unpack_from(self.arena.buffer, offset)
        validate_result(
            header,
            result_capacity=256,
            request_id=self.request_id,
            rows=TOKENS,
            hidden_size=HIDDEN,
            generation=self.client_generation,
        )
        verify(self.arena.buffer, offset, header)
        answer_TH = result_view(self.arena.buffer, offset, TOKENS, HIDDEN)
        assert (answer_TH == self.value + 1).all()
        assert self.arena.client_free(0)
        self.steps_written = 0

    # -- the server: looks, computes, replies; takes the slot back at any time after the client died

    @precondition(lambda self: self.accepted is None)
    @rule()
    def server_polls(self) -> None:
        if self.arena.flags.scan(0, 1, SlotState.WRITTEN.mask) == []:
            return
        # A consumed slot is whole, even if a process died meanwhile.
        assert self.steps_written == 4
        offset = self.arena.request_offset(0)
        header = RequestHeader.unpack_from(self.arena.buffer, offset)
        limits = SlotLimits(512, 256, HIDDEN, 1)
        fault = _protocol.request_fault(header.packed(), limits, self.arena.generation(0))
        validate_request(self.arena.buffer, offset, header, fault)
        hidden_TH, ids_TK, scores_TK = request_views(self.arena.buffer, offset, header)
        assert (hidden_TH == self.value).all()
        assert (ids_TK == header.request_id).all()
        assert (scores_TK == self.value).all()
        self.accepted = header
        self.computed_value = float(hidden_TH[0, 0]) + 1

    @precondition(lambda self: self.accepted is not None)
    @rule()
    def server_replies(self) -> None:
        assert self.accepted is not None
        request, self.accepted = self.accepted, None
        if request.generation != self.arena.generation(0):
            return
        offset = self.arena.result_offset(0)
        result_view(self.arena.buffer, offset, TOKENS, HIDDEN)[...] = self.computed_value
        header = ResultHeader.of(
            Status.OK,
            generation=request.generation,
            request_id=request.request_id,
            rows=TOKENS,
            hidden_size=HIDDEN,
        )
        seal(self.arena.buffer, offset, header)
        assert self.arena.server_done(0) == (self.arena.flags.load(0) != SlotState.OFFLINE)

    @precondition(lambda self: not self.client_lives)
    @rule()
    def server_takes_the_slot_back(self) -> None:
        self.arena.server_offline(0)

    @precondition(lambda self: not self.client_lives)
    @rule()
    def server_gives_the_slot_to_another_client(self) -> None:
        if self.arena.flags.load(0) != SlotState.OFFLINE:
            assert not self.arena.server_reclaim(0)
            return
        self.arena.set_generation(0, self.arena.generation(0) + 1)
        assert self.arena.server_reclaim(0)
        self.client_generation = self.arena.generation(0)
        self.client_lives = True
        self.steps_written = 0

    @invariant()
    def the_flag_has_a_name(self) -> None:
        SlotState(self.arena.flags.load(0))


SlotLife.TestCase.settings = settings(stateful_step_count=40)
TestSlotLife = SlotLife.TestCase
