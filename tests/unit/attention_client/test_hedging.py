"""Hedging: every order in which a request and its rivals can end."""

from __future__ import annotations

import itertools
import math
from typing import cast

import numpy as np
import pytest

from attention_client.connections.connection import Connection
from attention_client.connections.messages import Ticket
from attention_client.dispatch.parts import Part
from attention_client.layer_call import hedging
from attention_client.layer_call.attempts import Attempt, Result


def attempt_of(name: int) -> Attempt:
    part = Part(name, np.arange(1), np.zeros((1, 1), dtype=np.int32), 1.0)
    return Attempt(part, cast("Connection", object()), Ticket(0, name, 1, 1.0), 0.0, 1.0, 2.0)


def result_of(attempt: Attempt) -> Result:
    return Result(attempt.part, np.zeros((1, 1), dtype=np.float32), attempt, "s0")


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_hedge_ends_once_with_one_side_whole(count: int) -> None:
    everyone = range(count + 1)
    for order in itertools.permutations(everyone):
        for fails in itertools.product((False, True), repeat=count + 1):
            _play(count, order, fails)


def _play(count: int, order: tuple[int, ...], fails: tuple[bool, ...]) -> None:
    primary, rivals = attempt_of(0), [attempt_of(1 + i) for i in range(count)]
    attempts = [primary, *rivals]
    hedging.begin(primary, list(rivals))
    assert all(rival.hedge_at == math.inf for rival in rivals)
    alive, used, released, outcomes = set(attempts), [], [], []
    for number in order:
        attempt = attempts[number]
        if attempt not in alive:
            continue  # Called off.
        alive.remove(attempt)
        hedge = attempt.hedge
        if hedge is None:  # The other side failed before: it is a plain request now.
            used += [] if fails[number] else [attempt]
            continue
        if fails[number]:
            settled = hedging.settle_failed(hedge, attempt)
        else:
            settled = hedging.settle_answered(hedge, attempt, result_of(attempt))
        used += [result.attempt for result in settled.results]
        released += [result.attempt for result in settled.release]
        alive -= set(settled.call_off)
        if settled.beaten is not None:
            assert settled.outcome == "won"
            alive.remove(settled.beaten)
        outcomes += [settled.outcome] if settled.outcome else []
    assert len(outcomes) == 1
    assert not alive
    assert not set(used) & set(released)
    # Never a mixture: a pair would be counted twice.
    assert not (primary in used and set(rivals) & set(used))
    if outcomes == ["lost"]:
        assert used == [primary]
