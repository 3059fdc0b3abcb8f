"""Handlers of /v1/chat/completions and /v1/completions: pieces of an answer become chat messages or text."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from attention_client.serving.families.reader import Call, Reasoning
from attention_client.serving.prompts.bodies import ChatRequest, CompletionRequest
from attention_client.serving.requests.form import Form, chat_form
from attention_client.serving.requests.generation import Finish
from attention_client.serving.requests.handler import Handler
from attention_client.serving.requests.logprobs import (
    CompletionLogprobs,
    LogprobsForm,
    TokenTexts,
    chat_logprobs,
)

__all__ = ["ChatHandler", "TextHandler"]


class ChatHandler(Handler):
    """Handler of /v1/chat/completions: answers as chat messages, with reasoning and tool calls."""

    request_class = ChatRequest
    id_prefix = "chatcmpl"
    answer_object, chunk_object = "chat.completion", "chat.completion.chunk"
    opening: ClassVar = {"delta": {"role": "assistant", "content": ""}}

    def default_tokens(self, request: ChatRequest) -> int:
        """Return the model's default; without one, 1024."""
        return self._service.defaults.max_tokens or 1024

    def form(self, request: ChatRequest) -> Form:
        """Return the form that the answer must have, a constraint or tool calls."""
        letters = request.constraint is not None and request.constraint.is_raw
        skips_special = request.skips_special
        return chat_form(
            request, self._service.markup(skips_special=skips_special, letters=letters)
        )

    def logprobs_form(self, request: ChatRequest, texts: TokenTexts) -> LogprobsForm:
        """Return a new converter of one choice's log-probabilities."""
        return partial(chat_logprobs, texts)

    def chunk(self, piece: Any) -> dict[str, Any]:
        """Convert a piece of a choice, or its Finish, to the content of the choice in a stream's event."""
        if isinstance(piece, Finish):
            return {"delta": {}}
        if isinstance(piece, Call):
            call = {"index": piece.index, **_tool_call(piece)}
            return {"delta": {"tool_calls": [call]}}
        field = "reasoning_content" if isinstance(piece, Reasoning) else "content"
        return {"delta": {field: piece}}

    def whole(self, pieces: list[Any]) -> dict[str, Any]:
        """Convert all pieces to the message of a choice that is not streamed."""
        text = [piece for piece in pieces if isinstance(piece, str)]
        content = "".join(piece for piece in text if not isinstance(piece, Reasoning))
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning := "".join(piece for piece in text if isinstance(piece, Reasoning)):
            message["reasoning_content"] = reasoning
        if calls := [_tool_call(piece) for piece in pieces if isinstance(piece, Call)]:
            message["content"] = content or None
            message["tool_calls"] = calls
        return {"message": message}


class TextHandler(Handler):
    """Handler of /v1/completions: answers as plain text."""

    request_class = CompletionRequest
    id_prefix = "cmpl"
    answer_object = chunk_object = "text_completion"
    prompt_by_choice = True

    def default_tokens(self, request: CompletionRequest) -> int:
        """Return OpenAI's default, 16, or the model's if it is less."""
        return min(self._service.defaults.max_tokens or 16, 16)

    def logprobs_form(self, request: CompletionRequest, texts: TokenTexts) -> LogprobsForm:
        """Return a new converter of one choice's log-probabilities."""
        return CompletionLogprobs(texts, skips_special=request.skips_special)

    def chunk(self, piece: Any) -> dict[str, Any]:
        """Convert a piece of a choice, or its Finish, to the content of the choice in a stream's event."""
        return {"text": "" if isinstance(piece, Finish) else piece}

    def whole(self, pieces: list[Any]) -> dict[str, Any]:
        """Join all pieces to the text of a choice that is not streamed."""
        return {"text": "".join(pieces)}


def _tool_call(call: Call) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
