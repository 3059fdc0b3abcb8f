"""For the load generators: one streamed completion as a user sees it (text, times, end or error)."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

__all__ = ["Answer", "Events", "ask"]


@dataclass(frozen=True)
class Answer:
    """The result of one streamed completion. Times are monotonic seconds.

    Attributes:
        ended_s: Time of the end or of the failure.
        tokens: Number of the answer's tokens, counted by the server; 0 if the answer is incomplete.
        stamps_s: Time of each piece of text.
        error: Error text; empty on success.
        error_type: The server's type of the error, if any.
    """

    sent_s: float
    ended_s: float
    text: str
    tokens: int
    stamps_s: tuple[float, ...]
    error: str = ""
    error_type: str = ""

    @property
    def stall_s(self) -> float:
        """Longest time between two pieces of text, a stall for the user; 0 if there are fewer than two."""
        pairs = itertools.pairwise(self.stamps_s)
        return max((after - before for before, after in pairs), default=0.0)


async def ask(
    client: httpx.AsyncClient, base_url: str, prompt: Sequence[int], max_tokens: int
) -> Answer:
    """Request a greedy completion and read its stream to the end. Errors are in the answer, never raised.

    Args:
        client: HTTP client with timeouts.
        base_url: URL without "/v1".
        prompt: Token ids.
        max_tokens: Tokens of the answer.
    """
    body = {
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    pieces: list[str] = []
    stamps: list[float] = []
    tokens, error, kind = 0, "", ""
    sent = time.monotonic()
    try:
        request = client.stream("POST", f"{base_url}/v1/completions", json=body)
        async with request as response:
            if response.is_error:
                error, kind = _refusal((await response.aread()).decode(), response.status_code)
            else:
                async for chunk in _chunks(response):
                    now = time.monotonic()
                    if "error" in chunk:
                        error, kind = _words(chunk["error"])
                        break
                    tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
                    text = "".join(choice.get("text") or "" for choice in chunk["choices"])
                    if text:
                        pieces.append(text)
                        stamps.append(now)
                else:
                    # Only the last event of a complete answer has the usage.
                    error = "" if tokens else "the stream ended before its answer"
    except (httpx.HTTPError, json.JSONDecodeError) as broken:
        tokens, error = 0, repr(broken)
    return Answer(sent, time.monotonic(), "".join(pieces), tokens, tuple(stamps), error, kind)


class Events:
    """JSON documents of server-sent events, each in a line that ends with a line feed alone.

    httpx' `iter_lines` also ends a line at U+0085, U+2028 and others, which JSON need not escape.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> Iterator[Any]:
        """Take the next bytes of a stream; yield the documents that they complete, but for the end mark.

        Raises ValueError: an event is not JSON.
        """
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data: ").removesuffix(b"\r")
            if line.startswith(b"data: ") and data != b"[DONE]":
                yield json.loads(data.decode(errors="replace"))


async def _chunks(response: httpx.Response) -> AsyncIterator[Any]:
    events = Events()
    async for piece in response.aiter_bytes():
        for chunk in events.feed(piece):
            yield chunk


def _refusal(text: str, status: int) -> tuple[str, str]:
    try:
        words, kind = _words(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        return f"status {status}: {text[:200]}", ""
    return f"status {status}: {words}", kind


def _words(error: Any) -> tuple[str, str]:
    if isinstance(error, dict):
        return str(error.get("message", error)), str(error.get("type") or "")
    return str(error), ""
