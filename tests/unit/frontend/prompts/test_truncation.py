"""The oldest messages of a chat are left out until its prompt fits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaas.generation.errors import ApiError
from frontend.prompts.bodies import ChatRequest
from frontend.prompts.responses_body import ResponsesRequest

CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "1", "output": "r"}
ITEMS = {
    "u": {"role": "user", "content": "u"},
    "a": {"role": "assistant", "content": "a"},
    "c": CALL,
    "r": RESULT,
}


def roles(request: ChatRequest) -> str:
    return "".join(message.role[0] for message in request.messages)


def fit(items: str, room: int) -> str:
    """The roles of the messages that fit into this room."""
    given = [ITEMS[name] for name in items]
    request = ResponsesRequest.read({"input": given, "instructions": "i"})

    def encode(request: ChatRequest) -> list[int]:
        if len(request.messages) > room:
            raise ApiError.invalid("input", "too long", "context_length_exceeded")
        return [len(request.messages)]

    assert request.fitted(encode) == [len(request.messages)]
    return roles(request)


@pytest.mark.parametrize(
    ("items", "room", "expected"),
    [
        ("uauau", 6, "suauau"),
        ("uauau", 5, "suau"),
        ("uauau", 2, "su"),
        ("ucrcrcr", 9, "suatatat"),
        ("ucrcrcr", 7, "satatat"),
        ("ucrcrcr", 6, "satat"),
        ("ucrcrcr", 4, "sat"),
        ("crcr", 3, "sat"),
    ],
)
def test_the_oldest_turns_go(items: str, room: int, expected: str) -> None:
    assert fit(items, room) == expected


@pytest.mark.parametrize(("items", "room"), [("uau", 1), ("ucr", 1), ("u", 1), ("r", 1)])
def test_the_newest_turn_must_fit(items: str, room: int) -> None:
    with pytest.raises(ApiError, match="too long"):
        fit(items, room)


@given(
    items=st.lists(st.sampled_from(["u", "a", "cr"]), min_size=1, max_size=12).map("".join),
    room=st.integers(1, 16),
)
def test_what_is_left_is_the_longest_end_that_fits(items: str, room: int) -> None:
    whole = roles(ResponsesRequest.read({"input": [ITEMS[n] for n in items], "instructions": "i"}))
    try:
        left = fit(items, room)
    except ApiError:
        assert room < 4
        return
    assert len(left) <= room
    assert left[0] == "s"
    assert whole.endswith(left[1:])
    assert left == whole or left[1] in "ua"
