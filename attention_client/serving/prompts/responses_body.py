"""The JSON body of /v1/responses, for text, and the chat request that it stands for."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, WithJsonSchema

from attention_client.serving.api_error import ApiError
from attention_client.serving.grammars.constraint import Constraint, JsonSchema
from attention_client.serving.prompts.bodies import Body, ChatRequest, parse
from attention_client.serving.prompts.fields import Strict, unsupported

__all__ = ["ResponsesBody", "ResponsesRequest"]

# Names of the chat request's fields in this body, for errors.
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
}
_TEXT_PARTS = ("input_text", "output_text", "text")
_SAME = ("model", "stream", "temperature", "top_p", "top_k", "seed", "chat_template_kwargs")


class TextFormat(Strict):
    """The form of the answer: any text, a JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    definition: Annotated[JsonSchema, Field(alias="schema")] = None
    strict: bool | None = None
    description: str | None = None

    def for_chat(self) -> dict[str, Any]:
        """Return the field response_format of a chat request."""
        if self.type != "json_schema":
            return {"type": self.type}
        schema = {"name": self.name or "", "schema": self.definition, "strict": self.strict}
        return {"type": self.type, "json_schema": schema}


class TextOptions(Strict):
    """Options of the answer's text."""

    format: TextFormat | None = None
    verbosity: Any = None  # no effect


_INPUT_SCHEMA = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}, "minItems": 1}]
}


def _input(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return value
    raise ValueError("must be a string or a list of messages")


class ResponsesBody(Body):
    """Body of /v1/responses. Of OpenAI's fields it has those of text; answers are not stored."""

    placeholder: ClassVar[dict[str, Any]] = {"input": ""}

    input: Annotated[Any, BeforeValidator(_input), WithJsonSchema(_INPUT_SCHEMA)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    text: TextOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    tools: Annotated[list[Any] | None, unsupported([], vllm=True)] = None
    tool_choice: Annotated[Any, unsupported("auto", "none")] = None
    previous_response_id: Annotated[str | None, unsupported()] = None
    conversation: Annotated[Any, unsupported()] = None
    prompt: Annotated[Any, unsupported()] = None
    background: Annotated[bool | None, unsupported(False)] = None
    truncation: Annotated[str | None, unsupported("disabled")] = None
    top_logprobs: Annotated[int | None, unsupported(0)] = None

    # No effect on the answer.
    include: Any = None
    max_tool_calls: Any = None
    metadata: Any = None
    parallel_tool_calls: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    reasoning: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    stream_options: Any = None
    user: Any = None

    def for_chat(self) -> dict[str, Any]:
        """Return the chat request. Raises ApiError (400) for an item that is no text message."""
        fields = {name: getattr(self, name) for name in _SAME}
        if self.text is not None and self.text.format is not None:
            fields["response_format"] = self.text.format.for_chat()
        items = self.input
        if isinstance(items, str):
            items = [{"role": "user", "content": items}]
        messages = [_message(at, item) for at, item in enumerate(items)]
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        fields["messages"] = [message for message in messages if message is not None]
        fields["max_completion_tokens"] = self.max_output_tokens
        return {name: value for name, value in fields.items() if value is not None}


def _message(at: int, item: dict[str, Any]) -> dict[str, Any] | None:
    """Convert an input item to a chat message; None: reasoning of an earlier answer, which is left out."""
    kind = item.get("type", "message")
    if kind == "reasoning":
        return None
    if kind != "message":
        raise ApiError.invalid(
            f"input[{at}]",
            f"'input[{at}]': has the type {kind!r}; this endpoint reads messages only.",
        )
    content = item.get("content")
    if isinstance(content, list):
        content = [
            {**part, "type": "text"}
            if isinstance(part, dict) and part.get("type") in _TEXT_PARTS
            else part
            for part in content
        ]
    return {"role": item.get("role"), "content": content}


class ResponsesRequest(ChatRequest):
    """The chat request that a body of /v1/responses stands for."""

    messages_field: ClassVar[str] = "input"

    @classmethod
    def read(cls, fields: dict[str, Any]) -> Self:
        """Validate a body and convert it. Raises ApiError (400) that names the field of the body."""
        body = parse(ResponsesBody, fields)
        try:
            request = parse(cls, body.for_chat())
        except ApiError as error:
            name = next((name for name in _NAMES if (error.param or "").startswith(name)), None)
            if name is None:
                raise
            message = error.message.replace(name, _NAMES[name])
            raise ApiError.invalid(_NAMES[name], message, error.code or "invalid_value") from None
        request.restore(body.found())
        return request

    @property
    def constraint(self) -> Constraint | None:
        """The form that the answer must have, with its field's name in the body; None: any text."""
        found = super().constraint
        return found and replace(found, field=_NAMES.get(found.field, found.field))
