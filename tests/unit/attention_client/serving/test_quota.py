"""The limits of requests and of the memory of bodies."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_client.serving.accepted import AcceptedRequests, BodyMemory
from attention_client.serving.errors import ApiError


def test_the_next_request_beyond_the_limit_is_refused_until_one_ends() -> None:
    accepted = AcceptedRequests(3)
    with ExitStack() as running:
        for _ in range(3):
            running.enter_context(accepted.accept())
        with pytest.raises(ApiError, match="3 requests are already running or waiting") as refused:
            running.enter_context(accepted.accept())
        response = refused.value.response()
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
    with accepted.accept():
        pass


def test_each_sequence_of_a_request_is_counted_until_its_end() -> None:
    accepted = AcceptedRequests(4)
    with accepted.accept() as add:
        add(2)
        with pytest.raises(ApiError, match="4 requests"):
            add(2)
        with accepted.accept() as add_other, pytest.raises(ApiError):
            add_other(1)
    with accepted.accept() as add:
        add(3)


def test_a_failed_request_is_not_counted_any_more() -> None:
    accepted = AcceptedRequests(1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), accepted.accept():
            raise ZeroDivisionError


@given(st.lists(st.lists(st.integers(0, 50), max_size=5), max_size=10))
def test_bodies_stay_below_the_limit_and_free_all_memory(parts: list[list[int]]) -> None:
    """Parts of concurrent bodies; a refused body frees its memory."""
    memory = BodyMemory(100, free_bytes=10)
    with ExitStack() as bodies:
        lengths = []
        for sizes in parts:
            grow = bodies.enter_context(memory.body())
            length = 0
            for size in sizes:
                try:
                    grow(length + size)
                except ApiError:
                    assert sum(lengths) + max(0, length + size - 10) > 100
                    break
                length += size
            lengths.append(max(0, length - 10))
        assert sum(lengths) <= 100
    with memory.body() as grow:
        grow(110)


def test_a_small_body_needs_no_memory() -> None:
    memory = BodyMemory(100, free_bytes=10)
    with memory.body() as large, memory.body() as small, memory.body() as other:
        large(110)
        small(10)
        with pytest.raises(ApiError):
            other(11)
