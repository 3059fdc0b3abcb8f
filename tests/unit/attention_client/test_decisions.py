"""The decisions of a layer call, without servers: every order in which its requests can end."""

from __future__ import annotations

import itertools
import math
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_client.connections.connection import Connection
from attention_client.connections.messages import Ticket
from attention_client.dispatch.parts import Part, pairs_of
from attention_client.layer_call.decisions import (
    Attempt,
    Decisions,
    Failure,
    Servers,
    failure_of,
)
from eaas.wire.slot import Status

SERVERS = [cast("Connection", object()) for _ in range(4)]
WHOLE = np.ones((2, 2), dtype=np.bool_)


def attempt_of(pairs_TK: npt.NDArray[np.bool_], server: int = 0, hedge_at: float = 1.0) -> Attempt:
    """A request for these pairs; token t chose the experts 2t and 2t + 1."""
    rows_R = np.flatnonzero(pairs_TK.any(axis=1))
    ids_TK = np.arange(pairs_TK.size).reshape(pairs_TK.shape)
    ids_RK = np.where(pairs_TK, ids_TK, -1)[rows_R].astype(np.int32)
    part = Part(server, rows_R, ids_RK, 1.0)
    ticket = Ticket(0, 1, len(rows_R), 1.0)
    return Attempt(part, SERVERS[server], ticket, 0.0, hedge_at, 2.0)


def pairs(attempts: list[Attempt]) -> npt.NDArray[np.int64]:
    """How many of these requests hold each pair."""
    total_TK = np.zeros(WHOLE.shape, dtype=np.int64)
    for attempt in attempts:
        total_TK += pairs_of(attempt.part, WHOLE.shape)
    return total_TK


def one_call() -> tuple[Decisions, Attempt]:
    state, first = Decisions(WHOLE, 10.0), attempt_of(WHOLE)
    state.sent([first], is_all=True)
    return state, first


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_hedge_ends_once_with_one_side_whole(count: int) -> None:
    everyone = range(count + 1)
    for order in itertools.permutations(everyone):
        for fails in itertools.product((False, True), repeat=count + 1):
            _play(count, order, fails)


def _play(count: int, order: tuple[int, ...], fails: tuple[bool, ...]) -> None:
    state, late = one_call()
    single = [np.arange(WHOLE.size).reshape(WHOLE.shape) % count == i for i in range(count)]
    rivals = [attempt_of(pairs_TK, 1 + i) for i, pairs_TK in enumerate(single)]
    state.hedged(late, rivals)
    assert all(rival.hedge_at == math.inf for rival in rivals)
    attempts, outcomes = [late, *rivals], []
    for number in order:
        attempt = attempts[number]
        if attempt not in state.in_flight:
            continue  # Called off.
        ended = state.ended(attempt, Failure.ERROR if fails[number] else None, "failed")
        assert not {*ended.call_off, ended.beaten} & {*state.in_flight}
        assert not {*ended.unused} & {*state.answered}
        if ended.beaten is not None:
            assert (ended.beaten, ended.hedge) == (late, "won")
        outcomes += [ended.hedge] if ended.hedge else []
    assert len(outcomes) == 1
    assert not state.in_flight
    # Every pair has one result, or is to be sent again.
    missing_TK = np.zeros_like(WHOLE) if state.missing_TK is None else state.missing_TK
    assert (pairs(state.answered) + missing_TK == 1).all()
    if outcomes == ["lost"]:
        assert state.answered == [late]


@settings(max_examples=300)
@given(st.data())
def test_every_pair_is_missing_in_flight_or_answered(data: st.DataObject) -> None:
    drawn = data.draw(st.lists(st.booleans(), min_size=8, max_size=8), "wanted")
    wanted_TK = np.array(drawn).reshape(4, 2)
    state = Decisions(wanted_TK, 10.0)

    def held() -> npt.NDArray[np.int64]:
        rivals = {rival for a in state.in_flight if a.hedge is not None for rival in a.hedge.rivals}
        total_TK = np.zeros(wanted_TK.shape, dtype=np.int64)
        for attempt in [*state.answered, *(a for a in state.in_flight if a not in rivals)]:
            total_TK += pairs_of(attempt.part, wanted_TK.shape)
        return total_TK + (0 if state.missing_TK is None else state.missing_TK)

    for _ in range(data.draw(st.integers(0, 25), "steps")):
        step = data.draw(st.sampled_from(("send", "answer", "fail", "hedge", "overwritten")))
        server = data.draw(st.integers(0, 3), "server")
        if step == "send" and state.missing_TK is not None and state.missing_TK.any():
            missing = np.argwhere(state.missing_TK)
            some = data.draw(st.integers(1, len(missing)), "pairs")
            part_TK = np.zeros_like(wanted_TK)
            part_TK[tuple(missing[:some].T)] = True
            state.sent([attempt_of(part_TK, server)], is_all=some == len(missing))
        elif step in ("answer", "fail") and state.in_flight:
            attempt = data.draw(st.sampled_from(state.in_flight), "request")
            failure = data.draw(st.sampled_from(Failure)) if step == "fail" else None
            before = state.reasons.copy()
            ended = state.ended(attempt, failure, "failed")
            assert len(ended.blamed) <= 1
            assert (attempt.connection in state.reasons) >= (
                failure not in (None, Failure.SPARE_GONE)
            )
            assert before.items() <= state.reasons.items()
        elif step == "hedge" and (late := state.late(1.0)):
            part_TK = pairs_of(late[0].part, wanted_TK.shape)
            split = np.arange(8).reshape(4, 2) % 2 == 0
            sides = [part_TK & split, part_TK & ~split]
            state.hedged(late[0], [attempt_of(side, server) for side in sides if side.any()])
        elif step == "overwritten" and state.answered:
            state.lost_result(data.draw(st.sampled_from(state.answered), "result"))
        assert (held() == wanted_TK).all()
    in_flight, answered = state.take_all()
    assert not state.in_flight
    assert len({*map(id, in_flight)} | {*map(id, answered)}) == len(in_flight) + len(answered)


def test_a_server_is_blamed_once_and_avoided() -> None:
    state, first = one_call()
    assert state.ended(first, Failure.TIMEOUT, "late").blamed == (SERVERS[0],)
    servers = Servers(SERVERS[:2], [True, True], [False, False], [False, True])
    assert state.preferred(servers) == [False, False]
    assert state.healthy(servers) == [False, True]
    assert state.needs_pause(servers)
    again = attempt_of(WHOLE)
    state.sent([again], is_all=True)
    assert state.ended(again, Failure.TIMEOUT, "late").blamed == ()


def test_patience_doubles_with_each_timeout_within_the_deadline() -> None:
    state = Decisions(WHOLE, 10.0)
    seen = []
    for _ in range(6):
        seen.append(state.patience_s(SERVERS[0], 0.5, 1.0))
        attempt = attempt_of(WHOLE)
        state.sent([attempt], is_all=True)
        state.ended(attempt, Failure.TIMEOUT, "late")
    assert seen == [0.5, 1.0, 2.0, 4.0, 8.0, 9.0]
    assert state.patience_s(SERVERS[1], 0.5, 1.0) == 0.5
    assert state.is_over(10.0)
    assert state.patience_s(SERVERS[1], 0.5, 11.0) > 0


def test_a_late_request_is_hedged_once() -> None:
    state, first = one_call()
    assert state.due_at(0.0) == 1.0
    assert state.late(0.9) == []
    assert state.late(1.0) == [first]
    assert state.late(1.5) == []
    assert state.due_at(1.5) == first.expires_at


@pytest.mark.parametrize(
    ("status", "has_spares", "failure"),
    [
        (Status.INVALID_ARGUMENT, False, None),
        (Status.STALE_PLACEMENT, False, Failure.DECLINED),
        (Status.STALE_PLACEMENT, True, Failure.SPARE_GONE),
        (Status.EXPIRED, True, Failure.DECLINED),
        (Status.INTERNAL, False, Failure.ERROR),
    ],
)
def test_refusals(status: Status, has_spares: bool, failure: Failure | None) -> None:
    assert failure_of(status, has_spares=has_spares) is failure
    assert failure is None or failure.is_fault == (failure is Failure.ERROR)
