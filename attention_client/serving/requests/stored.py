"""Responses that are kept in memory, so that a later request can name one as the history of its input."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple

from attention_client.serving.limits import ServeLimits
from attention_client.serving.prompts.body import load_json
from attention_client.serving.prompts.responses_body import input_items
from eaas.generation.errors import ApiError

__all__ = ["StoredResponses"]


_FIELD = "previous_response_id"


class _Turn(NamedTuple):
    body: bytes  # of the request; it is read again only if it becomes history
    response: bytes
    previous: str | None

    @property
    def size(self) -> int:
        return len(self.body) + len(self.response)


class StoredResponses:
    """Responses by id. The oldest that no one uses go first when there is no more room.

    Used on the event loop only.

    Args:
        limits: How many responses, and how many bytes of requests and responses.
    """

    def __init__(self, limits: ServeLimits) -> None:
        self._limits = limits
        self._turns: dict[str, _Turn] = {}
        self._bytes = 0

    async def with_history(self, body: bytes) -> bytes:
        """Return a body whose input begins with the history that it names.

        Raises ApiError (400): a response of the history is not stored, or the history is too long.
        """
        if _FIELD.encode() not in body:  # most bodies need not be read here
            return body
        fields = await asyncio.to_thread(load_json, body)
        previous, turns = fields.get(_FIELD), []
        while isinstance(previous, str):
            if previous not in self._turns:
                message = _unknown(previous)
                raise ApiError.invalid(_FIELD, message, "previous_response_not_found")
            turn = self._turns[previous] = self._turns.pop(previous)  # now the newest
            turns.append(turn)
            previous = turn.previous
        most = self._limits.max_body_bytes
        if sum(turn.size for turn in turns) > most:
            reason = f"The conversation is larger than {most} bytes. Begin a new one."
            raise ApiError.invalid(_FIELD, reason)
        return await asyncio.to_thread(_joined, turns, fields)

    def keep(self, body: bytes, response: dict[str, Any]) -> None:
        """Store the body of a request with its response."""
        written = json.dumps(response, separators=(",", ":")).encode()
        turn = _Turn(body, written, response[_FIELD])
        self._turns[response["id"]] = turn
        self._bytes += turn.size
        most, most_bytes = self._limits.max_stored_responses, self._limits.max_stored_bytes
        while len(self._turns) > most or self._bytes > most_bytes:
            self.remove(next(iter(self._turns)))

    def get(self, name: str) -> bytes:
        """Return a response as JSON. Raises ApiError (404)."""
        if name not in self._turns:
            raise ApiError(404, _unknown(name), code="response_not_found")
        return self._turns[name].response

    def remove(self, name: str) -> None:
        """Forget a response, which ends the history of later ones. Raises ApiError (404)."""
        self.get(name)
        self._bytes -= self._turns.pop(name).size


def _unknown(name: str) -> str:
    return f"No response {name!r} is stored here: it never was, or newer ones took its place."


def _joined(turns: list[_Turn], fields: dict[str, Any]) -> bytes:
    items: list[Any] = []
    for turn in reversed(turns):
        items += input_items(json.loads(turn.body)["input"]) + json.loads(turn.response)["output"]
    given = input_items(fields.get("input"))
    if turns and isinstance(given, list):  # else the body is refused
        fields["input"] = items + given
    return json.dumps(fields).encode()
