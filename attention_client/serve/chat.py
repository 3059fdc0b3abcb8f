"""/v1/chat/completions, on transformers' handler (its prompt and answer builders)."""

from __future__ import annotations

import inspect
from typing import Any

import jinja2
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.utils import (
    Modality,
    ReasoningText,
    build_response_parser,
    get_response_template,
)

from attention_client.serve.errors import ApiError
from attention_client.serve.generation import Call, Finish
from attention_client.serve.handler import Handler, usage_of
from attention_client.serve.requests import ChatRequest
from attention_client.serve.service import Service

__all__ = ["ChatHandler"]


class ChatHandler(Handler, ChatCompletionHandler):  # type: ignore[misc]
    """/v1/chat/completions."""

    request_class = ChatRequest
    id_prefix = "chatcmpl"
    chunk_object = "chat.completion.chunk"
    prompt_field = "messages"
    default_tokens = 1024

    def __init__(self, service: Service) -> None:
        self._service = service

    def prompt_tokens(self, request: ChatRequest) -> list[int]:
        """The messages in the model's chat template. Raises ApiError."""
        tokenizer = self._service.tokenizer
        tools = self._tools(request)
        extra = request.chat_template_kwargs or {}
        reserved = inspect.signature(tokenizer.apply_chat_template).parameters.keys() & extra.keys()
        if reserved:
            raise ApiError(
                400,
                f"chat_template_kwargs must not hold {sorted(reserved)}.",
                param="chat_template_kwargs",
                code="invalid_value",
            )
        if not tokenizer.chat_template:
            raise ApiError(400, "This model has no chat template. Use /v1/completions instead.")
        messages = self.get_processor_inputs_from_messages(
            [message.for_template() for message in request.messages], Modality.LLM
        )
        try:
            text = tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, tokenize=False, **extra
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            # Templates raise to say which orders of roles they know.
            raise ApiError(
                400,
                f"The model's chat template refuses these messages: {error}",
                param="messages",
                code="invalid_value",
            ) from error
        # The template itself writes the special tokens.
        return self._service.encode(text, "messages", add_special_tokens=False)

    def _tools(self, request: ChatRequest) -> list[dict[str, Any]] | None:
        if not request.tools or request.tool_choice == "none":
            return None
        service = self._service
        known = (
            service.tokenizer.chat_template
            and "tools" in service.tokenizer.get_chat_template(tools=[{}])
            and get_response_template(service.tokenizer, service.model) is not None
        )
        if not known:
            raise ApiError(
                400,
                "This model's chat template has no tools.",
                param="tools",
                code="unsupported_parameter",
            )
        return [tool.model_dump() for tool in request.tools]

    def parser(self, request: ChatRequest, prompt: list[int]) -> Any | None:
        """transformers' parser, if the model's answers are known to have parts."""
        service = self._service
        template = get_response_template(service.tokenizer, service.model)
        if template is None:
            return None
        if getattr(service.tokenizer, "response_template", None) is None:
            # It was guessed from the model's type. The tokenizer may be another one's.
            anchors = template["start_anchor"]
            anchors = [anchors] if isinstance(anchors, str) else anchors
            rendered = service.tokenizer.decode(prompt)
            if not any(anchor in rendered for anchor in anchors):
                return None
        return build_response_parser(
            service.tokenizer, service.model, prompt, tools=self._tools(request)
        )

    def opening(self) -> list[dict[str, Any]]:
        """The role, as OpenAI's streams begin."""
        return [_choice({"role": "assistant", "content": ""})]

    def choice(self, request_id: str, piece: Any) -> dict[str, Any]:
        """The delta of a piece."""
        if isinstance(piece, Finish):
            return _choice({}, piece.reason)
        if isinstance(piece, Call):
            call = {"index": piece.index, **_tool_call(request_id, piece)}
            return _choice({"tool_calls": [call]})
        field = "reasoning_content" if isinstance(piece, ReasoningText) else "content"
        return _choice({field: piece})

    def answer(self, request_id: str, pieces: list[Any], finish: Finish) -> dict[str, Any]:
        """The chat completion."""
        calls = [_tool_call(request_id, piece) for piece in pieces if isinstance(piece, Call)]
        reasoning = "".join(piece for piece in pieces if isinstance(piece, ReasoningText))
        content = "".join(piece for piece in pieces if not isinstance(piece, (ReasoningText, Call)))
        return dict(
            self._build_completion(
                request_id,
                content,
                self._service.name,
                finish_reason=finish.reason,
                usage=usage_of(finish),
                tool_calls=calls or None,
                reasoning_content=reasoning or None,
            )
        )


def _choice(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _tool_call(request_id: str, call: Call) -> dict[str, Any]:
    return {
        "id": f"{request_id}_tool_call_{call.index}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
