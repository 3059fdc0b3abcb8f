"""The request queue: every request is taken once, the oldest first of all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_client.scheduler import RequestQueue, SelectionStrategy, strategy, strategy_names
from eaas.errors import ConfigError

EXPERTS = 12


def queue_of(chosen: SelectionStrategy, batch_size: int = 4, window_size: int = 12) -> RequestQueue:
    return RequestQueue(chosen, batch_size=batch_size, window_size=window_size)


@pytest.mark.parametrize(
    ("batch_size", "window_size", "named"), [(8, 7, "window of 7"), (0, 4, "batch size 0")]
)
def test_wrong_sizes(batch_size: int, window_size: int, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        queue_of(strategy("fcfs"), batch_size, window_size)


@pytest.mark.parametrize("name", strategy_names())
@settings(max_examples=30)
@given(st.lists(st.integers(-3, 6), max_size=60), st.integers(0, 2**32))
def test_every_request_is_taken_once(name: str, steps: list[int], seed: int) -> None:
    """Steps: n > 0 requests arrive; 0 takes a full batch and -n at most n requests; some leave."""
    rng = np.random.default_rng(seed)
    queue = queue_of(strategy(name))
    waiting: list[int] = []
    for step in [*steps, *[0] * 60]:
        for _ in range(max(step, 0)):
            waiting.append(queue.add(rng.integers(0, 9, EXPERTS).astype(float)))
        if step > 3 and len(waiting) > 1:
            gone = waiting.pop(int(rng.integers(len(waiting))))
            queue.remove(gone)
        if step <= 0:
            room = -step or 4
            taken = queue.take(-step or None)
            assert len(taken) == min(room, len(waiting))
            assert not taken or waiting[0] in taken  # the oldest
            assert set(taken) <= set(waiting[:12])
            waiting = [ticket for ticket in waiting if ticket not in taken]
        assert len(queue) == len(waiting)
    assert not waiting
    with pytest.raises(KeyError):
        queue.remove(0)


class Wrong(SelectionStrategy):
    name = "wrong"

    def __init__(self, answer: list[int]) -> None:
        self.answer = answer

    def select(self, window_WE, batch_size, rng, context):  # type: ignore[no-untyped-def]
        return np.array(self.answer)


@pytest.mark.parametrize("answer", [[0, 1], [0, 1, 1], [1, 2, 3], [0, 1, 9], [0, 1, -1], []])
def test_a_strategy_that_breaks_its_contract_is_named(answer: list[int]) -> None:
    queue = queue_of(Wrong(answer), batch_size=3)
    for _ in range(6):
        queue.add(np.ones(EXPERTS))
    with pytest.raises(ConfigError, match="'wrong' chose"):
        queue.take()
