"""One streamed completion, with and without errors."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaas_cli.bench.stream import Answer, Events, ask


def event(**fields: object) -> str:
    return f"data: {json.dumps(fields)}\n\n"


def piece(text: str, **more: object) -> str:
    return event(choices=[{"text": text}], **more)


END = piece("", usage={"completion_tokens": 3}) + "data: [DONE]\n\n"
GONE = {"message": "layer 1: no live replica", "type": "experts_unavailable"}


def answer(handler: object) -> Answer:
    async def run() -> Answer:
        transport = httpx.MockTransport(handler)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport) as client:
            return await ask(client, "http://x", [1], 7)

    return asyncio.run(run())


def test_an_answer() -> None:
    asked: list[bytes] = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request.content)
        assert request.url == "http://x/v1/completions"
        return httpx.Response(200, text=piece("a ") + piece("") + piece("b") + END)

    found = answer(handle)
    assert (found.text, found.tokens, found.error, found.error_type) == ("a b", 3, "", "")
    assert len(found.stamps_s) == 2
    assert found.sent_s <= found.stamps_s[0] <= found.ended_s
    assert json.loads(asked[0]) == {
        "prompt": [1],
        "max_tokens": 7,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def response(text: str, status: int = 200) -> Any:
    return lambda request: httpx.Response(status, text=text)


def broken(request: httpx.Request) -> httpx.Response:
    raise httpx.ReadError("gone")


JSON_ERROR = (
    "JSONDecodeError('Expecting property name enclosed in double quotes: line 1 column 2 (char 1)')"
)


@pytest.mark.parametrize(
    ("handler", "error", "kind"),
    [
        (
            response(json.dumps({"error": GONE}), 503),
            f"status 503: {GONE['message']}",
            GONE["type"],
        ),
        (response(piece("a") + event(error=GONE) + piece("b")), GONE["message"], GONE["type"]),
        (response("<html>", 502), "status 502: <html>", ""),
        (response('{"error": "odd"}', 500), "status 500: odd", ""),
        (response(piece("a") + piece("b")), "the stream ended before its answer", ""),
        (response(""), "the stream ended before its answer", ""),
        (response(piece("a") + "data: {\n\n"), JSON_ERROR, ""),
        (broken, "ReadError('gone')", ""),
    ],
)
def test_an_error_is_returned_and_not_raised(handler: object, error: str, kind: str) -> None:
    found = answer(handler)
    assert (found.error, found.error_type) == (error, kind)


def test_a_stall_is_the_longest_time_between_pieces() -> None:
    stamps = (1.0, 1.5, 4.0, 4.1)
    assert Answer(0.0, 5.0, "", 4, stamps).stall_s == 2.5
    assert Answer(0.0, 5.0, "", 1, (1.0,)).stall_s == 0.0


@given(
    st.lists(st.text(st.sampled_from("a\u0085\u2028\u000b\u001c\u20ac"))),
    st.lists(st.integers(0, 200)),
)
def test_events_end_with_line_feeds_alone(texts: list[str], cuts: list[int]) -> None:
    lines = [f"data: {json.dumps(text, ensure_ascii=False)}\r\n\r\n" for text in texts]
    stream = "".join([": comment\n", *lines, "data: [DONE]\n"]).encode()
    ends = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    events = Events()
    found = [
        text for begin, end in itertools.pairwise(ends) for text in events.feed(stream[begin:end])
    ]
    assert found == texts
