"""Stored responses: histories, bounds, removal."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaas.generation.errors import ApiError
from frontend.limits import ServeLimits
from frontend.requests.responses import StoredResponses


def respond(
    stored: StoredResponses, name: str, previous: str | None = None, text: Any = "q"
) -> Any:
    """Store a response; return the input with its history."""
    body = json.dumps({"input": text, "previous_response_id": previous}).encode()
    whole = asyncio.run(stored.with_history(body))
    output = [{"role": "assistant", "content": name}]
    stored.keep(body, {"id": name, "previous_response_id": previous, "output": output})
    return json.loads(whole)["input"]


def said(items: list[dict[str, Any]]) -> list[str]:
    return [item["content"] for item in items]


def test_a_response_is_the_history_of_the_next() -> None:
    stored = StoredResponses(ServeLimits())
    assert respond(stored, "a") == "q"
    assert said(respond(stored, "b", "a", [{"role": "user", "content": "r"}])) == ["q", "a", "r"]
    assert said(respond(stored, "c", "b")) == ["q", "a", "r", "b", "q"]
    assert said(respond(stored, "d", "a")) == ["q", "a", "q"]  # another branch
    assert json.loads(stored.get("d"))["id"] == "d"
    stored.remove("b")
    for gone in ("b", "c"):  # its history has a hole
        with pytest.raises(ApiError, match="'b'") as caught:
            respond(stored, "e", gone)
        assert (caught.value.status, caught.value.param) == (400, "previous_response_id")
    for use in (stored.get, stored.remove):
        with pytest.raises(ApiError) as caught:
            use("b")
        assert caught.value.status == 404


def is_kept(stored: StoredResponses, name: str) -> bool:
    try:
        return bool(stored.get(name))
    except ApiError:
        return False


def test_bounds() -> None:
    stored = StoredResponses(ServeLimits(max_stored_responses=2))
    for name in "abc":
        respond(stored, name)
    assert [is_kept(stored, name) for name in "abc"] == [False, True, True]
    none = StoredResponses(ServeLimits(max_stored_responses=0))
    respond(none, "a")
    assert not is_kept(none, "a")
    small = StoredResponses(ServeLimits(max_stored_bytes=400))
    respond(small, "a", text="x" * 500)
    respond(small, "b")
    assert [is_kept(small, name) for name in "ab"] == [False, True]
    long = StoredResponses(ServeLimits(max_body_bytes=350))
    respond(long, "a", text="x" * 100)
    respond(long, "b", "a", text="x" * 9)
    with pytest.raises(ApiError, match="larger than 350 bytes"):
        respond(long, "c", "b", text="x" * 100)


@given(names=st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=20, unique=True))
def test_what_is_removed_makes_room(names: list[str]) -> None:
    stored = StoredResponses(ServeLimits(max_stored_responses=4, max_stored_bytes=100_000))
    for name in names:
        respond(stored, name)
    for name in names[-4:]:
        stored.remove(name)
    respond(stored, "last", text="x" * 99_800)
    assert stored.get("last")


def test_the_oldest_goes_first() -> None:
    stored = StoredResponses(ServeLimits(max_stored_responses=3))
    for name in "abc":
        respond(stored, name)
    assert said(respond(stored, "d", "a")) == ["q", "a", "q"]  # a is in use
    assert [is_kept(stored, name) for name in "abcd"] == [True, False, True, True]
