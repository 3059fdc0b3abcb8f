"""Leaves out the oldest messages of a chat whose prompt is too long."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from attention_client.serving.api_error import ApiError
from attention_client.serving.prompts.bodies import ChatRequest

__all__ = ["fitted"]


def fitted(request: ChatRequest, encode: Callable[[ChatRequest], list[int]]) -> list[int]:
    """Return the prompt of a request, which loses as few of its oldest messages as possible.

    The system's messages at the beginning and the newest turn stay. Raises ApiError (400).
    """
    messages = request.messages
    roles = [message.role for message in messages]
    first = next((at for at, role in enumerate(roles) if role not in ("system", "developer")), 0)

    def prompt(start: int) -> list[int]:
        request.messages = messages[:first] + messages[start:]
        return encode(request)

    def fits(start: int) -> bool:
        try:
            return bool(prompt(start))
        except ApiError as error:
            if error.code != "context_length_exceeded":
                raise
            return False

    # A chat begins with a user's message or, after the last of these, with one of the assistant: never
    # with a tool's result without its call.
    users = [at for at, role in enumerate(roles) if role == "user" and at >= first]
    own = [at for at, role in enumerate(roles) if role == "assistant" and at > max([first, *users])]
    starts = [first, *(at for at in users + own if at > first)]
    # The later the start, the shorter the prompt.
    at = bisect_left(starts, True, key=fits)
    return prompt(starts[min(at, len(starts) - 1)])
