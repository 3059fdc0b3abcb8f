"""Handler of /v1/chat/completions in the attention client: pieces of an answer to chat messages."""

from __future__ import annotations

from typing import Any

from attention_client.serving.families.markup import Markup
from attention_client.serving.families.pieces import Call, Finish, Reasoning
from attention_client.serving.families.reader import AnswerReader, Calls
from attention_client.serving.prompts.bodies import ChatRequest
from attention_client.serving.requests.chat_form import chat_form
from attention_client.serving.requests.form import Form
from attention_client.serving.requests.handler import Handler
from attention_client.serving.requests.logprobs import ChatLogprobs

__all__ = ["ChatHandler"]


class ChatHandler(Handler):
    """Handler of /v1/chat/completions: answers as chat messages, with reasoning and tool calls."""

    request_class = ChatRequest
    id_prefix = "chatcmpl"
    answer_object, chunk_object = "chat.completion", "chat.completion.chunk"

    @staticmethod
    def default_tokens(of_model: int | None) -> int:
        """Return the model's default; without one, 1024."""
        return of_model or 1024

    def markup(self, request: ChatRequest) -> Markup:
        """Return the markup of the model's answers."""
        constraint = request.constraint
        return self._service.markup(
            skips_special=request.skips_special,
            letters=constraint is not None and constraint.is_raw,
        )

    def form(self, request: ChatRequest) -> Form | None:
        """Return the form that the answer must have, a constraint or tool calls; None: any text."""
        return chat_form(request, self.markup(request))

    def reader(self, request: ChatRequest, form: Form | None) -> AnswerReader:
        """Return a new reader of one answer."""
        tools = request.tools if request.offered_tools is not None else None
        reading: dict[str, Any] = {
            "opening": request.opening,
            "continues": bool(request.continue_final_message),
            "calls": Calls.ANYWHERE if tools else Calls.NEVER,
            "tools": {tool.function.name: tool.function.parameters for tool in tools or ()},
            "one_call": request.parallel_tool_calls is False,
            "earlier": request.earlier_calls,
        }
        return AnswerReader(self.markup(request), **reading | (form.reading if form else {}))

    def echo(self, request: ChatRequest, prompt: list[int], index: int) -> str | None:
        """Return the last message's text if it is the assistant's and the request asks for it, as in vLLM."""
        return request.last_answer if request.echo else None

    def logprobs_form(self, request: ChatRequest) -> ChatLogprobs:
        """Return a new converter of one choice's log-probabilities."""
        return ChatLogprobs(self.token_texts(request))

    def opening(self) -> dict[str, Any]:
        """Return the content of each choice's first event, sent before any token: it has the role."""
        return {"delta": {"role": "assistant", "content": ""}}

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


def _tool_call(call: Call) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
