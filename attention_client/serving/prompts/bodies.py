"""The JSON bodies of the HTTP endpoint's two generating paths, and their validation.

A known field that changes the answer is supported, or refused with a reason. A field without an effect on
the answer (bookkeeping of OpenAI's API) is accepted. An unknown field is ignored, as in vLLM, and named.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core.core_schema import no_info_after_validator_function

from attention_client.serving.api_error import ApiError
from attention_client.serving.grammars.constraint import ConstraintFields, FieldError, check_depth

__all__ = [
    "CONTINUE_RULE",
    "MOST_PROMPTS",
    "Body",
    "ChatRequest",
    "CompletionRequest",
    "GenerationRequest",
    "Message",
    "Strict",
    "TemplateFields",
    "Tool",
    "load_json",
    "parse",
    "unsupported",
]

_INT64 = 2**63
_STOPS = 16
_STOP_CHARACTERS = 1024
_MOST_CHOICES = 128
_MOST_TOP = 20
_MOST_STOP_TOKENS = 128
_MOST_BIASED = 1024
_TOKEN_ID = "[0-9]{1,10}"

MOST_PROMPTS = 1024
"""Most prompts of one request."""
_MOST_IGNORED = 16  # names of ignored fields to report


class _only:
    """Refuses every value except None and the neutral ones: the field is not supported.

    Args:
        neutral: The values that change nothing.
        vllm: Whether vLLM, the other engine, supports the field.
    """

    def __init__(self, *neutral: Any, vllm: bool = False) -> None:
        self._neutral = neutral
        self._vllm = vllm

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, _schema: Any, _handler: Any) -> dict[str, Any]:
        return {"enum": [None, *self._neutral]}

    def _check(self, value: Any) -> Any:
        if value is not None and value not in self._neutral:
            allowed = " or ".join(json.dumps(each) for each in self._neutral)
            raise ValueError(
                "is not supported"
                + (f" other than {allowed}" if allowed else "")
                + ("; the engine of `eaas up --engine vllm` has it" if self._vllm else "")
            )
        return value


unsupported = _only  # its name for other modules
_STOP = {"type": "string", "minLength": 1, "maxLength": _STOP_CHARACTERS}
_TOKENS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_PROMPTS = {
    "type": "array",
    "items": {"anyOf": [{"type": "string"}, _TOKENS]},
    "minItems": 1,
    "maxItems": MOST_PROMPTS,
}
_PARTS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
    },
}
# The JSON schemas of the checks below.
_STOPS_SCHEMA = {
    "anyOf": [{"type": "null"}, _STOP, {"type": "array", "items": _STOP, "maxItems": _STOPS}]
}
_PROMPT_SCHEMA = {"anyOf": [{"type": "string"}, _TOKENS, _PROMPTS]}
_BIAS_SCHEMA = {
    "anyOf": [
        {"type": "null"},
        {
            "type": "object",
            "propertyNames": {"pattern": f"^{_TOKEN_ID}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": _MOST_BIASED,
        },
    ]
}
_TOOL_CHOICE_SCHEMA = {
    "anyOf": [
        {"enum": [None, "auto", "none", "required"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}},
                    "required": ["name"],
                },
            },
            "required": ["type", "function"],
        },
    ]
}
_CONTENT_SCHEMA = {"anyOf": [{"type": "null"}, {"type": "string"}, _PARTS]}


def _stops(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return []
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError("must be a non-empty string or a list of them")
    if len(stops) > _STOPS:
        raise ValueError(f"has {len(stops)} strings; the limit is {_STOPS}")
    longest = max(map(len, stops), default=0)
    if longest > _STOP_CHARACTERS:
        raise ValueError(
            f"has a string of {longest} characters; the limit is {_STOP_CHARACTERS} characters each"
        )
    return stops


def _prompts(value: Any) -> list[Any]:
    """Return a list of prompts, each a string or a list of token ids."""
    if isinstance(value, str) or _is_tokens(value):
        return [value]
    if isinstance(value, list) and len(value) > MOST_PROMPTS:
        raise ValueError(f"has {len(value)} prompts; the limit is {MOST_PROMPTS}")
    is_list = isinstance(value, list) and bool(value)
    if is_list and all(isinstance(each, str) or _is_tokens(each) for each in value):
        return list(value)
    raise ValueError("must be a string, a list of token ids, or a list of these")


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _bias(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if len(value) > _MOST_BIASED:
        raise ValueError(f"has {len(value)} tokens; the limit is {_MOST_BIASED}")
    for token, bias in value.items():
        if not re.fullmatch(_TOKEN_ID, token):
            raise ValueError("must have token ids as keys")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ValueError("must have values from -100 to 100")
    return value


def _content(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of parts, each with a type")
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise ValueError("must be a string or a list of parts, each with a type")
        if kind != "text":
            raise ValueError(f"has a part of type {kind!r}; this model reads text parts only")
        if not isinstance(part.get("text"), str):
            raise ValueError("has a text part without a text")
    return value


def _tool_choice(value: Any) -> Any:
    if value is None or value in ("auto", "none", "required"):
        return value
    try:
        name = value["function"]["name"]
        if value["type"] == "function" and isinstance(name, str):
            return {"type": "function", "function": {"name": name}}
    except (TypeError, KeyError):
        pass
    raise ValueError(
        "must be auto, none, required or a function: "
        '{"type": "function", "function": {"name": NAME}}'
    )


class Strict(BaseModel):
    """Base of bodies and their parts: no conversions between types, unknown fields are ignored."""

    model_config = ConfigDict(
        extra="ignore", strict=True, allow_inf_nan=False, protected_namespaces=()
    )


class StreamOptions(Strict):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: with include_usage, in every event
    include_obfuscation: bool | None = None  # has no effect
    # Not in OpenAI's API: an event before each token's text with the expert servers that computed it.
    include_servers: bool | None = None


# The fields on which the answer depends, except the prompt.
_SETTINGS = {
    "model",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "ignore_eos",
    "n",
    "best_of",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "echo",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "continue_final_message",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "return_token_strs",
    *ConstraintFields.model_fields,
}


class Body(Strict):
    """What the bodies of all paths have."""

    # A prompt of one token in place of the real one.
    placeholder: ClassVar[dict[str, Any]]

    model: str | None = None

    _ignored: tuple[str, ...] = PrivateAttr(())

    @classmethod
    def read(cls, fields: dict[str, Any]) -> Self:
        """Validate the JSON object of a request's body. Raises ApiError (400) that names the field."""
        return parse(cls, fields)

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of the body's unknown fields, at most some; the request is answered without them."""
        return self._ignored

    def found(self) -> dict[str, Any]:
        """Return what reading found beside the settings, as JSON, for `restore`."""
        return {"ignored": self._ignored}

    def restore(self, found: dict[str, Any]) -> None:
        """Set what the prompt worker found in the body."""
        self._ignored = tuple(found["ignored"])

    def settings(self) -> dict[str, Any]:
        """Return a small body that parses to this request without its prompt: the prompt worker's answer."""
        fields = self.model_dump(include=_SETTINGS, exclude_unset=True, by_alias=True)
        return self.placeholder | fields


def _rule(field: str, value: dict[str, Any], needs: str, needed: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of: if a field has such a value, another field has such a value, too."""
    return {
        "if": {"properties": {field: value}, "required": [field]},
        "then": {"properties": {needs: needed}, "required": [needs]},
    }


_STREAM_RULE = _rule("stream_options", {"type": "object"}, "stream", {"const": True})
_BEST_OF_RULE = _rule("best_of", {"type": "integer", "minimum": 2}, "n", {"type": "integer"})
_TOP_RULE = _rule("top_logprobs", {"type": "integer", "minimum": 1}, "logprobs", {"const": True})
CONTINUE_RULE: dict[str, Any] = {
    "not": {
        "properties": {
            "continue_final_message": {"const": True},
            "add_generation_prompt": {"const": True},
        },
        "required": ["continue_final_message", "add_generation_prompt"],
    }
}
"""The JSON schema of the rule between two of the `TemplateFields`."""


class GenerationRequest(Body, ConstraintFields):
    """Fields of a request's body that both generating endpoints have."""

    model_config = ConfigDict(json_schema_extra={"allOf": [_STREAM_RULE]})

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    logit_bias: Annotated[
        dict[str, float] | None, BeforeValidator(_bias), WithJsonSchema(_BIAS_SCHEMA)
    ] = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    stop: Annotated[list[str], BeforeValidator(_stops), WithJsonSchema(_STOPS_SCHEMA)] = []
    stop_token_ids: (
        Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=_MOST_STOP_TOKENS)] | None
    ) = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    n: Annotated[int, Field(ge=1, le=_MOST_CHOICES)] | None = None

    # Only neutral values are accepted.
    use_beam_search: Annotated[bool | None, _only(False, vllm=True)] = None
    bad_words: Annotated[list[Any] | None, _only([], vllm=True)] = None
    allowed_token_ids: Annotated[Any, _only(vllm=True)] = None
    prompt_logprobs: Annotated[Any, _only(vllm=True)] = None
    truncate_prompt_tokens: Annotated[Any, _only(vllm=True)] = None

    # No effect on the answer.
    metadata: Any = None
    prompt_cache_key: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    user: Any = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self

    @property
    def token_budget(self) -> int | None:
        """Most tokens of the request's answer; None: not set, so the handler's default holds."""
        return self.max_tokens

    @property
    def choices_per_prompt(self) -> int:
        """Number of answers to each prompt."""
        return self.n or 1

    @property
    def likeliest(self) -> int | None:
        """Number of likeliest tokens to report beside each token's log-probability; None: report nothing."""
        return None

    @property
    def biased_tokens(self) -> dict[int, float]:
        """What is added to the logits of tokens, by token id."""
        return {int(token): bias for token, bias in (self.logit_bias or {}).items()}


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions."""

    model_config = ConfigDict(json_schema_extra={"allOf": [_STREAM_RULE, _BEST_OF_RULE]})

    placeholder: ClassVar[dict[str, Any]] = {"prompt": [0]}

    prompt: Annotated[
        list[str | list[int]], BeforeValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)
    ]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    best_of: Annotated[int, Field(ge=1, le=_MOST_CHOICES)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=_MOST_TOP)] | None = None

    suffix: Annotated[str | None, _only("")] = None

    @field_validator("best_of")
    @classmethod
    def _best_of_is_n(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value != (info.data.get("n") or 1):
            raise ValueError("is not supported other than equal to n")
        return value

    @property
    def likeliest(self) -> int | None:
        """Number of likeliest tokens to report beside each token's log-probability; None: report nothing."""
        return self.logprobs

    def settings(self) -> dict[str, Any]:
        """Return the base's settings, and for echo the prompts that are strings."""
        settings = super().settings()
        if self.echo:
            settings["prompt"] = [each if isinstance(each, str) else [0] for each in self.prompt]
        return settings


class FunctionCall(BaseModel):
    """A tool call that the model made in an earlier turn."""

    model_config = ConfigDict(strict=True)

    name: str
    arguments: str

    @model_validator(mode="after")
    def _arguments_are_an_object(self) -> FunctionCall:
        try:
            arguments = json.loads(self.arguments)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise ValueError("arguments must be a JSON object in a string")
        return self


class ToolCallIn(BaseModel):
    """A tool call in a message of the history."""

    model_config = ConfigDict(strict=True)

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        """Return the call in the form of chat templates, with the arguments as an object."""
        call = self.model_dump(exclude_none=True)
        call["function"]["arguments"] = json.loads(self.function.arguments)
        return call


class Message(BaseModel):
    """One chat message. Fields of answers that prompts do not use are accepted."""

    model_config = ConfigDict(
        strict=True,
        json_schema_extra={
            "anyOf": [
                {
                    "properties": {"content": {"type": ["string", "array"]}},
                    "required": ["content"],
                },
                {
                    "properties": {
                        "role": {"const": "assistant"},
                        "tool_calls": {"type": "array", "minItems": 1},
                    },
                    "required": ["tool_calls"],
                },
            ]
        },
    )

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Any, BeforeValidator(_content), WithJsonSchema(_CONTENT_SCHEMA)] = None
    tool_calls: list[ToolCallIn] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _something_is_said(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is missing")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message in the form of chat templates: one text, and "system" for "developer"."""
        # "developer" is OpenAI's newer name; templates use the older one.
        role = "system" if self.role == "developer" else self.role
        text = ""
        # Text in a message with tool calls is the markup of those calls.
        if self.tool_calls is None:
            text = self.content or ""
            if not isinstance(text, str):
                text = " ".join(part["text"] for part in text)
        message: dict[str, Any] = {"role": role, "content": text}
        if self.tool_calls is not None:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


class FunctionTool(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: str

    @model_validator(mode="after")
    def _parameters_are_an_object(self) -> FunctionTool:
        if not isinstance(self.parameters, dict):
            raise ValueError("parameters must be a JSON schema: an object")
        check_depth(self.parameters)
        return self

    @property
    def parameters(self) -> Any:
        """The JSON schema of the arguments."""
        given = (self.model_extra or {}).get("parameters")
        return {"type": "object", "properties": {}} if given is None else given


class Tool(Strict):
    """A tool that the request offers to the model."""

    type: Literal["function"]
    function: FunctionTool


class TemplateFields(Strict):
    """Fields of a request that chat templates read."""

    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[Tool] | None = None

    chat_template: Annotated[str | None, _only()] = None

    @field_validator("continue_final_message")
    @classmethod
    def _one_way_to_end(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        if value and info.data.get("add_generation_prompt"):
            raise ValueError("excludes add_generation_prompt: true")
        return value

    @property
    def opens_answer(self) -> bool:
        """Whether the template opens the answer's message after the last message."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt


class ChatRequest(GenerationRequest, TemplateFields):
    """Body of /v1/chat/completions."""

    model_config = ConfigDict(json_schema_extra={"allOf": [_STREAM_RULE, _TOP_RULE, CONTINUE_RULE]})

    placeholder: ClassVar[dict[str, Any]] = {"messages": [{"role": "user", "content": ""}]}

    # Name of the field of the messages, for errors.
    messages_field: ClassVar[str] = "messages"

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tool_choice: Annotated[
        Any, BeforeValidator(_tool_choice), WithJsonSchema(_TOOL_CHOICE_SCHEMA)
    ] = None
    parallel_tool_calls: bool | None = None

    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=_MOST_TOP)] | None = None
    modalities: Annotated[list[str] | None, _only(["text"])] = None
    audio: Annotated[Any, _only()] = None
    functions: Annotated[Any, _only()] = None
    function_call: Annotated[Any, _only()] = None
    prediction: Annotated[Any, _only()] = None
    web_search_options: Annotated[Any, _only()] = None
    documents: Annotated[Any, _only()] = None

    reasoning_effort: Any = None
    verbosity: Any = None

    @field_validator("top_logprobs")
    @classmethod
    def _top_logprobs_need_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError("needs logprobs: true")
        return value

    @model_validator(mode="after")
    def _chosen_tools_exist(self) -> ChatRequest:
        if not self.forces_tools:
            return self
        if not self.tools:
            raise FieldError("tool_choice", "needs tools")
        if not self.forced_tools:
            name = self.tool_choice["function"]["name"]
            raise FieldError("tool_choice", f"no tool has the name {name!r}")
        return self

    @property
    def forces_tools(self) -> bool:
        """Whether the answer must be a tool call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, dict)

    @property
    def forced_tools(self) -> list[FunctionTool]:
        """The functions of which the answer must call one; empty: the model may answer with text."""
        tools = [tool.function for tool in self.tools or ()]
        if isinstance(self.tool_choice, dict):
            name = self.tool_choice["function"]["name"]
            return [tool for tool in tools if tool.name == name][:1]
        return tools if self.tool_choice == "required" else []

    @property
    def likeliest(self) -> int | None:
        """Number of likeliest tokens to report beside each token's log-probability; None: report nothing."""
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the model may call, in the form of chat templates; None: no tools."""
        if not self.tools or self.tool_choice == "none":
            return None
        return [tool.model_dump() for tool in self.tools]

    @property
    def token_budget(self) -> int | None:
        """Most tokens of the request's answer; the newer name of the field wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


_Request = TypeVar("_Request", bound=Body)


def load_json(body: bytes) -> dict[str, Any]:
    """Parse the JSON object of a request's body, the first step of reading it. Raises ApiError (400)."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise ApiError(400, f"The body is not valid JSON: {reason}.", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    return fields


def parse(cls: type[_Request], body: dict[str, Any]) -> _Request:
    """Validate a request's JSON object, before tokenization. Raises ApiError (400) that names the field."""
    try:
        # Tokenizers and sockets take UTF-8; JSON escapes can hold text that UTF-8 cannot encode.
        json.dumps(body, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        raise ApiError(
            400, "The body contains invalid Unicode text or is nested too deeply."
        ) from None
    try:
        request = cls.model_validate(body)
    except ValidationError as error:
        raise _refusal(error) from None
    request._ignored = tuple(_unknown(cls, body)[:_MOST_IGNORED])
    return request


def _unknown(cls: type[BaseModel], body: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the names of fields that a class ignores, also in the objects of its own fields."""
    known = {field.alias or name: field for name, field in cls.model_fields.items()}
    names = [prefix + name for name in body if name not in known]
    for name, field in known.items():
        inner = body.get(name)
        if not isinstance(inner, dict):
            continue
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                names += _unknown(kind, inner, f"{prefix}{name}.")
    return names


_CODES = {"extra_forbidden": "unknown_parameter", "missing": "missing_required_parameter"}


def _refusal(error: ValidationError) -> ApiError:
    """Convert the first validation error of a body to the client's error."""
    first = error.errors(include_url=False, include_input=False)[0]
    param = ""
    for part in first["loc"]:
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else str(part)
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, FieldError):
        param = cause.field
    reason = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = f"Unknown parameter: '{param}'."
    elif first["type"] == "missing":
        message = f"Missing required parameter: '{param}'."
    else:
        message = f"'{param}': {reason}." if param else f"{reason}."
    code = _CODES.get(first["type"], "invalid_value")
    return ApiError(400, message, param=param or None, code=code)
