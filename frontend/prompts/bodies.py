"""The JSON bodies of OpenAI's generating paths, and of /tokenize and /detokenize in vLLM's form.

A known field that changes the answer is supported, or refused with a reason. A field without an effect on
the answer (bookkeeping of OpenAI's API) is accepted.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, ValidationInfo, field_validator, model_validator

from eaas.checkpoint.generation_file import MinP, RepetitionPenalty, TopK, TopP
from frontend.prompts.body import (
    BadWords,
    Bias,
    Body,
    FieldError,
    Prompts,
    Seed,
    Stops,
    Strict,
    ToolChoice,
    Whole,
    other_fields,
)
from frontend.prompts.constraint import ConstraintFields
from frontend.prompts.messages import FunctionTool, Message, Tool

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "GenerationRequest",
    "TokenizeRequest",
]

_MOST_CHOICES = 128
_MOST_TOP = 20
_MOST_STOP_TOKENS = 128

_Token = Annotated[int, Field(ge=0), Whole]


class StreamOptions(Strict):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: with include_usage, in every event
    include_obfuscation: bool | None = None  # has no effect
    # Not in OpenAI's API: an event before each token's text with the expert servers that computed it.
    include_servers: bool | None = None


class GenerationRequest(Body, ConstraintFields, other_fields("GenerationRequest")):  # type: ignore[misc]
    """Fields of a request's body that both generating endpoints have."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1), Whole] | None = None
    min_tokens: Annotated[int, Field(ge=0), Whole] | None = None
    ignore_eos: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: TopP | None = None
    top_k: Annotated[TopK, Whole] | None = None
    min_p: MinP | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: Bias | None = None
    seed: Seed | None = None
    stop: Stops = Field([])
    stop_token_ids: Annotated[list[_Token], Field(max_length=_MOST_STOP_TOKENS)] | None = None
    allowed_token_ids: Annotated[list[_Token], Field(min_length=1)] | None = None
    bad_words: BadWords | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    n: Annotated[int, Field(ge=1, le=_MOST_CHOICES), Whole] | None = None

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
    def likeliest(self) -> int | None:
        """Number of likeliest tokens to report beside each token's log-probability; None: report nothing."""
        return None

    @property
    def skips_special(self) -> bool:
        """Whether answers have no text of special tokens."""
        return self.skip_special_tokens is not False

    @property
    def echoed(self) -> list[str]:
        """The texts that the request wants before the answers to its prompts; empty: none."""
        return list(self.found.get("texts", ()))


class CompletionRequest(GenerationRequest, other_fields("CompletionRequest")):  # type: ignore[misc]
    """Body of /v1/completions."""

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0), Whole] | None = None
    best_of: Annotated[int, Field(ge=1, le=_MOST_CHOICES), Whole] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=_MOST_TOP), Whole] | None = None

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


class TemplateFields(other_fields("TemplateFields")):  # type: ignore[misc]
    """Fields of a request that chat templates read."""

    # Name of the field of the messages, for errors.
    messages_field: ClassVar[str] = "messages"

    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[Tool] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None

    @field_validator("continue_final_message")
    @classmethod
    def _one_way_to_end(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        if value and info.data.get("add_generation_prompt"):
            raise ValueError("excludes add_generation_prompt: true")
        return value

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables of the chat template that the request sets."""
        effort = self.reasoning_effort
        # As in vLLM: for templates whose models can think or not.
        thinks = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        return (thinks if effort else {}) | (self.chat_template_kwargs or {})

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the model may call, in the form of chat templates; None: no tools."""
        return [tool.for_template() for tool in self.tools] if self.tools else None

    @property
    def opens_answer(self) -> bool:
        """Whether the template opens the answer's message after the last message."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt


class ChatRequest(GenerationRequest, TemplateFields, other_fields("ChatRequest")):  # type: ignore[misc]
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1), Whole] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None

    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=_MOST_TOP), Whole] | None = None
    include_reasoning: bool | None = None
    echo: bool | None = None

    @model_validator(mode="after")
    def _fields_fit_together(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs", "needs logprobs: true")
        if self.include_reasoning is False and (self.logprobs or self.return_token_ids):
            raise FieldError(
                "include_reasoning", "false excludes logprobs and return_token_ids, which tell it"
            )
        if (self.tool_choice == "required" or self.names_tool) and not self.tools:
            raise FieldError("tool_choice", "needs tools")
        if self.names_tool and not self.forced_tools:
            name = self.tool_choice["function"]["name"]
            raise FieldError("tool_choice", f"no tool has the name {name!r}")
        return self

    @property
    def opening(self) -> str:
        """The end of the prompt that begins the answer, such as `<think>`."""
        return str(self.found.get("opening", ""))

    @property
    def names_tool(self) -> bool:
        """Whether the request names the function that the answer calls."""
        return isinstance(self.tool_choice, dict)

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
        return None if self.tool_choice == "none" else super().offered_tools

    @property
    def token_budget(self) -> int | None:
        """Most tokens of the request's answer; the newer name of the field wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TokenizeRequest(Body, TemplateFields):
    """Body of /tokenize: a prompt, or the messages of a chat."""

    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_text(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("needs either prompt or messages")
        return self

    @property
    def adds_special_tokens(self) -> bool:
        """Whether to add the tokenizer's special tokens, which a chat template has already added."""
        return self.messages is None if self.add_special_tokens is None else self.add_special_tokens


class DetokenizeRequest(Body):
    """Body of /detokenize: token ids."""

    tokens: list[int]
