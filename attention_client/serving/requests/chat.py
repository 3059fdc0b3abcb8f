"""Handler of /v1/chat/completions in the attention client: pieces of an answer to chat messages."""

from __future__ import annotations

from typing import Any

from transformers.cli.serving.utils import (
    build_response_parser,
    get_response_template,
)

from attention_client.serving.prompts.bodies import ChatRequest
from attention_client.serving.requests.chat_form import chat_form
from attention_client.serving.requests.form import Form
from attention_client.serving.requests.handler import Handler
from attention_client.serving.requests.logprobs import ChatLogprobs
from attention_client.serving.requests.pieces import Call, Finish, Reasoning

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

    def parser(self, request: ChatRequest, prompt: list[int]) -> Any | None:
        """Return the parser of reasoning and tool calls (transformers'); None if answers are plain text."""
        service = self._service
        template = get_response_template(service.tokenizer, service.model)
        if template is None:
            return None
        if getattr(service.tokenizer, "response_template", None) is None:
            # transformers guessed the template from the model type. The tokenizer may not match it.
            anchors = template["start_anchor"]
            anchors = [anchors] if isinstance(anchors, str) else anchors
            rendered = service.tokenizer.decode(prompt)
            if not any(anchor in rendered for anchor in anchors):
                return None
        return build_response_parser(
            service.tokenizer, service.model, prompt, tools=request.offered_tools
        )

    def form(self, request: ChatRequest, parser: Any | None) -> Form | None:
        """Return the form that the answer must have, a constraint or tool calls; None: any text."""
        return chat_form(
            request, get_response_template(self._service.tokenizer, self._service.model), parser
        )

    def continues(self, request: ChatRequest) -> bool:
        """Whether the prompt ends with the beginning of the answer's message."""
        return bool(request.continue_final_message)

    def logprobs_form(self, request: ChatRequest) -> ChatLogprobs:
        """Return a new converter of one choice's log-probabilities."""
        return ChatLogprobs(self._service.token_texts)

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
        message: dict[str, Any] = {
            "role": "assistant",
            "content": "".join(piece for piece in text if not isinstance(piece, Reasoning)),
        }
        if reasoning := "".join(piece for piece in text if isinstance(piece, Reasoning)):
            message["reasoning_content"] = reasoning
        if calls := [_tool_call(piece) for piece in pieces if isinstance(piece, Call)]:
            message["tool_calls"] = calls
        return {"message": message}


def _tool_call(call: Call) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
