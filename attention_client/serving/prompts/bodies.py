"""The JSON bodies of the HTTP endpoint's two generating paths.

A known field that changes the answer is supported, or refused with a reason. A field without an effect on
the answer (bookkeeping of OpenAI's API) is accepted.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import (
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from attention_client.serving.grammars.constraint import ConstraintFields, FieldError
from attention_client.serving.prompts.body import Body
from attention_client.serving.prompts.fields import (
    BadWords,
    Bias,
    NoEffect,
    Prompts,
    Seed,
    Stops,
    Strict,
    ToolChoice,
    Whole,
    unsupported,
)
from attention_client.serving.prompts.messages import FunctionTool, Message, Tool
from eaas.checkpoint.generation_file import MinP, RepetitionPenalty, TopK, TopP

__all__ = [
    "CONTINUE_RULE",
    "ChatRequest",
    "CompletionRequest",
    "GenerationRequest",
    "TemplateFields",
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
    logit_bias: Bias = None
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

    # Only neutral values are accepted.
    cache_salt: Annotated[Any, unsupported(vllm=True)] = None
    ec_transfer_params: Annotated[Any, unsupported(vllm=True)] = None
    kv_transfer_params: Annotated[Any, unsupported(vllm=True)] = None
    logprob_token_ids: Annotated[Any, unsupported([], vllm=True)] = None
    priority: Annotated[Any, unsupported(0, instead="requests run in the order of arrival")] = None
    prompt_logprobs: Annotated[Any, unsupported(vllm=True)] = None
    repetition_detection: Annotated[Any, unsupported(vllm=True)] = None
    return_token_offsets: Annotated[Any, unsupported(False, vllm=True)] = None
    routed_experts_prompt_start: Annotated[Any, unsupported(0, vllm=True)] = None
    thinking_token_budget: Annotated[
        Any,
        unsupported(-1, instead="limit max_tokens, or switch thinking off in the chat template"),
    ] = None
    truncate_prompt_tokens: Annotated[Any, unsupported(vllm=True)] = None
    use_beam_search: Annotated[Any, unsupported(False, vllm=True)] = None
    vllm_xargs: Annotated[Any, unsupported({}, vllm=True)] = None
    watermarking: Annotated[Any, unsupported(False, vllm=True)] = None

    length_penalty: NoEffect = None  # of beam search
    metadata: NoEffect = None
    mm_payload: NoEffect = None
    prompt_cache_key: NoEffect = None
    request_id: NoEffect = None
    return_mm_kwargs: NoEffect = None
    safety_identifier: NoEffect = None
    service_tier: NoEffect = None
    session_id: NoEffect = None
    spaces_between_special_tokens: NoEffect = None  # none are added
    store: NoEffect = None
    stream_interval: NoEffect = None
    truncation_side: NoEffect = None  # of truncate_prompt_tokens
    user: NoEffect = None

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
    def skips_special(self) -> bool:
        """Whether answers have no text of special tokens."""
        return self.skip_special_tokens is not False

    @property
    def names_tool(self) -> bool:
        """Whether the request names the function that the answer calls."""
        return False

    @property
    def biased_tokens(self) -> dict[int, float]:
        """What is added to the logits of tokens, by token id."""
        return {int(token): bias for token, bias in (self.logit_bias or {}).items()}


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions."""

    model_config = ConfigDict(json_schema_extra={"allOf": [_STREAM_RULE, _BEST_OF_RULE]})

    placeholder: ClassVar[dict[str, Any]] = {"prompt": [0]}

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0), Whole] | None = None
    best_of: Annotated[int, Field(ge=1, le=_MOST_CHOICES), Whole] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=_MOST_TOP), Whole] | None = None

    prompt_embeds: Annotated[Any, unsupported(vllm=True)] = None
    suffix: Annotated[Any, unsupported("", instead="fill in by the model's own prompt format")] = (
        None
    )

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


class TemplateFields(Strict):
    """Fields of a request that chat templates read."""

    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[Tool] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None

    chat_template: Annotated[Any, unsupported(instead="set chat_template_kwargs")] = None

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
    max_completion_tokens: Annotated[int, Field(ge=1), Whole] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None

    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=_MOST_TOP), Whole] | None = None
    include_reasoning: bool | None = None
    echo: bool | None = None

    # Only neutral values are accepted.
    audio: Annotated[Any, unsupported(instead="the model writes text")] = None
    function_call: Annotated[Any, unsupported("none", "auto", instead="use tool_choice")] = None
    functions: Annotated[Any, unsupported([], instead="use tools")] = None
    modalities: Annotated[Any, unsupported(["text"], instead="the model writes text")] = None
    moderation: Annotated[Any, unsupported(instead="check the texts before and after")] = None
    prediction: Annotated[Any, unsupported(instead="leave it out")] = None
    return_prompt_text: Annotated[Any, unsupported(False, vllm=True)] = None
    web_search_options: Annotated[Any, unsupported(instead="offer a search in tools")] = None

    media_io_kwargs: NoEffect = None  # there are no media
    mm_processor_kwargs: NoEffect = None
    prompt_cache_options: NoEffect = None
    prompt_cache_retention: NoEffect = None
    verbosity: NoEffect = None

    _opening: str = PrivateAttr("")
    _earlier_calls: int = PrivateAttr(0)

    @field_validator("top_logprobs")
    @classmethod
    def _top_logprobs_need_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError("needs logprobs: true")
        return value

    @model_validator(mode="after")
    def _reasoning_is_told(self) -> ChatRequest:
        if self.include_reasoning is False and (self.logprobs or self.return_token_ids):
            raise FieldError(
                "include_reasoning", "false excludes logprobs and return_token_ids, which tell it"
            )
        return self

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
    def opening(self) -> str:
        """The end of the prompt that begins the answer, such as `<think>`; set once it is known."""
        return self._opening

    @opening.setter
    def opening(self, text: str) -> None:
        self._opening = text

    def found(self) -> dict[str, Any]:
        """Return what reading found, with the opening."""
        calls = self.earlier_calls
        return super().found() | {"opening": self._opening, "earlier_calls": calls}

    def restore(self, found: dict[str, Any]) -> None:
        """Set what the prompt worker found, with the opening."""
        super().restore(found)
        self._opening = found.get("opening", "")
        self._earlier_calls = found.get("earlier_calls", 0)

    @property
    def earlier_calls(self) -> int:
        """Number of tool calls in the messages."""
        calls = sum(len(message.tool_calls or ()) for message in self.messages)
        return calls or self._earlier_calls

    @property
    def names_tool(self) -> bool:
        """Whether the request names the function that the answer calls."""
        return isinstance(self.tool_choice, dict)

    @property
    def last_answer(self) -> str | None:
        """The text of the last message, if it is the assistant's."""
        last = self.messages[-1]
        return last.for_template()["content"] if last.role == "assistant" else None

    def settings(self) -> dict[str, Any]:
        """Return the base's settings, and for echo the last message if it is the assistant's."""
        settings = super().settings()
        if self.echo and self.last_answer:
            settings["messages"] = [{"role": "assistant", "content": self.last_answer}]
        return settings

    @property
    def forces_tools(self) -> bool:
        """Whether the answer must be a tool call."""
        return self.tool_choice == "required" or self.names_tool

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
        return [tool.for_template() for tool in self.tools]

    @property
    def token_budget(self) -> int | None:
        """Most tokens of the request's answer; the newer name of the field wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
