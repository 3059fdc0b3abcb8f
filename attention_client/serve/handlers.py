"""The two generating endpoints, on transformers' handlers (their chunk and answer builders)."""

from __future__ import annotations

import inspect
import json
import secrets
import uuid
from abc import abstractmethod
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, ClassVar

import jinja2
from fastapi.responses import JSONResponse, StreamingResponse
from openai.types import Completion, CompletionUsage
from openai.types.chat import ChatCompletionChunk
from openai.types.chat.chat_completion_chunk import ChoiceDeltaToolCall
from starlette.types import Receive, Scope, Send
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.utils import (
    Modality,
    ReasoningText,
    build_response_parser,
    get_response_template,
)

from attention_client.serve.engine import Work
from attention_client.serve.errors import ApiError
from attention_client.serve.generation import Call, Finish, Generation
from attention_client.serve.requests import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    parse,
)
from attention_client.serve.sampling import Sampling
from attention_client.serve.service import Service

__all__ = ["ChatHandler", "TextHandler"]

_GREEDY_BELOW = 1e-5  # scores divided by less overflow
_DONE = "data: [DONE]\n\n"


class _EventStream(StreamingResponse):
    """Server-sent events whose generator ends with the response, not with the garbage collector."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.body_iterator):  # type: ignore[type-var]
            await super().__call__(scope, receive, send)


class _Handler:
    """What both endpoints do the same way."""

    request_class: ClassVar[type[GenerationRequest]]
    id_prefix: ClassVar[str]
    prompt_field: ClassVar[str]
    default_tokens: ClassVar[int]

    _service: Service

    async def handle_request(self, body: dict[str, Any], _request_id: str) -> Any:
        """Answers one request. The client's own request id is only echoed, by the middleware.

        Raises ApiError, before anything is generated.
        """
        service = self._service
        request = parse(self.request_class, body)
        service.check_admission(request.model)
        prompt = self.prompt_tokens(request)
        work = self._work(request, prompt)
        parser = self.parser(request, prompt)
        generation = Generation(
            service.engine, work, service.tokenizer, request.stop, parser, service.metrics
        )
        if request.stream:
            return _EventStream(self._events(generation, request), media_type="text/event-stream")
        pieces = [piece async for piece in generation.pieces()]
        return JSONResponse(self.answer(generation.id, pieces[:-1], pieces[-1]))

    @abstractmethod
    def prompt_tokens(self, request: Any) -> list[int]:
        """The prompt's token ids. Raises ApiError."""

    @abstractmethod
    def parser(self, request: Any, prompt: list[int]) -> Any | None:
        """What parts the answer into reasoning, tool calls and text, if anything."""

    @abstractmethod
    def opening(self, request_id: str) -> list[str]:
        """Events before the first token."""

    @abstractmethod
    def event(self, request_id: str, piece: Any) -> str:
        """The event of a piece of the answer, or of its Finish."""

    @abstractmethod
    def usage_event(self, request_id: str, usage: CompletionUsage) -> str:
        """The event without choices that include_usage asks for."""

    @abstractmethod
    def answer(self, request_id: str, pieces: list[Any], finish: Finish) -> dict[str, Any]:
        """The whole answer."""

    async def _events(
        self, generation: Generation, request: GenerationRequest
    ) -> AsyncIterator[str]:
        for event in self.opening(generation.id):
            yield event
        options = request.stream_options
        try:
            async with aclosing(generation.pieces()) as pieces:  # type: ignore[type-var]
                async for piece in pieces:
                    yield self.event(generation.id, piece)
            if options is not None and options.include_usage:
                yield self.usage_event(generation.id, _usage(piece))
        except ApiError as error:
            yield error.sse()
        yield _DONE

    def chunk_to_sse(self, chunk: Any) -> str:
        """transformers' form of an event, with the finish_reason that OpenAI's client asks for."""
        data = chunk.model_dump(exclude_none=True)
        for choice in data["choices"]:
            choice.setdefault("finish_reason", None)
        return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"

    def _work(self, request: GenerationRequest, prompt: list[int]) -> Work:
        service = self._service
        room = service.max_model_len - len(prompt)
        budget = request.token_budget
        if budget is None:
            budget = min(self.default_tokens, room)
        wanted = max(budget, 1)
        if room < wanted:
            raise ApiError(
                400,
                f"This model's maximum context length is {service.max_model_len} tokens. However, "
                f"you requested {len(prompt) + wanted} tokens ({len(prompt)} in the prompt, "
                f"{wanted} in the answer). Shorten the prompt or lower max_tokens.",
                param=self.prompt_field,
                code="context_length_exceeded",
            )
        if request.min_tokens is not None and request.min_tokens > budget:
            raise ApiError(
                400,
                f"min_tokens ({request.min_tokens}) is larger than max_tokens ({budget}).",
                param="min_tokens",
                code="invalid_value",
            )
        return Work(
            id=f"{self.id_prefix}-{uuid.uuid4().hex}",
            prompt=prompt,
            max_tokens=budget,
            end_tokens=() if request.ignore_eos else service.end_tokens,
            sampling=self._sampling(request, len(prompt)),
        )

    def _sampling(self, request: GenerationRequest, prompt_length: int) -> Sampling:
        defaults = self._service.sampling
        temperature = request.temperature
        if temperature is None:
            asks = request.top_p is not None or request.top_k is not None
            temperature = defaults.temperature or (1.0 if asks else 0.0)
        return Sampling(
            temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
            top_p=defaults.top_p if request.top_p is None else request.top_p,
            top_k=defaults.top_k if request.top_k is None else max(request.top_k, 0),
            seed=secrets.randbits(63) if request.seed is None else request.seed,
            min_length=prompt_length + (request.min_tokens or 0),
            end_tokens=self._service.end_tokens,
        )


class ChatHandler(_Handler, ChatCompletionHandler):  # type: ignore[misc]
    """/v1/chat/completions."""

    request_class = ChatRequest
    id_prefix = "chatcmpl"
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

    def opening(self, request_id: str) -> list[str]:
        """The role, as OpenAI's streams begin."""
        return [self._build_chunk_sse(request_id, role="assistant", model=self._service.name)]

    def event(self, request_id: str, piece: Any) -> str:
        """The chunk of a piece."""
        name = self._service.name
        if isinstance(piece, Finish):
            return str(
                self._build_chunk_sse(
                    request_id, finish_reason=piece.reason, model=name, usage=_usage(piece)
                )
            )
        if isinstance(piece, Call):
            call = ChoiceDeltaToolCall.model_validate(
                {"index": piece.index, **_tool_call(request_id, piece)}
            )
            return str(self._build_chunk_sse(request_id, model=name, tool_calls=[call]))
        if isinstance(piece, ReasoningText):
            return str(self._build_chunk_sse(request_id, model=name, reasoning_content=piece))
        return str(self._build_chunk_sse(request_id, model=name, content=piece))

    def usage_event(self, request_id: str, usage: CompletionUsage) -> str:
        """OpenAI's last chunk."""
        chunk = ChatCompletionChunk(
            id=request_id,
            choices=[],
            created=self._service.clock(),
            model=self._service.name,
            object="chat.completion.chunk",
            usage=usage,
        )
        return self.chunk_to_sse(chunk)

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
                usage=_usage(finish),
                tool_calls=calls or None,
                reasoning_content=reasoning or None,
            )
        )


class TextHandler(_Handler, CompletionHandler):  # type: ignore[misc]
    """/v1/completions."""

    request_class = CompletionRequest
    id_prefix = "cmpl"
    prompt_field = "prompt"
    default_tokens = 16  # OpenAI's

    def __init__(self, service: Service) -> None:
        self._service = service

    def prompt_tokens(self, request: CompletionRequest) -> list[int]:
        """The prompt, tokenized if it is not yet. Raises ApiError."""
        if isinstance(request.prompt, str):
            return self._service.encode(request.prompt, "prompt", add_special_tokens=True)
        return self._service.check_tokens(request.prompt, "prompt")

    def parser(self, request: CompletionRequest, prompt: list[int]) -> None:
        """Plain text has no parts."""

    def opening(self, request_id: str) -> list[str]:
        """Nothing."""
        return []

    def event(self, request_id: str, piece: Any) -> str:
        """The chunk of a piece."""
        name = self._service.name
        if isinstance(piece, Finish):
            return str(
                self._build_chunk_sse(
                    request_id, name, finish_reason=piece.reason, usage=_usage(piece)
                )
            )
        return str(self._build_chunk_sse(request_id, name, text=piece))

    def usage_event(self, request_id: str, usage: CompletionUsage) -> str:
        """OpenAI's last chunk."""
        chunk = Completion(
            id=request_id,
            choices=[],
            created=self._service.clock(),
            model=self._service.name,
            object="text_completion",
            usage=usage,
        )
        return self.chunk_to_sse(chunk)

    def answer(self, request_id: str, pieces: list[Any], finish: Finish) -> dict[str, Any]:
        """The text completion."""
        choice = {
            "index": 0,
            "text": "".join(pieces),
            "finish_reason": finish.reason,
            "logprobs": None,
        }
        return {
            "id": request_id,
            "object": "text_completion",
            "created": self._service.clock(),
            "model": self._service.name,
            "choices": [choice],
            "usage": _usage(finish).model_dump(exclude_none=True),
        }


def _usage(finish: Finish) -> CompletionUsage:
    return CompletionUsage(
        prompt_tokens=finish.prompt_tokens,
        completion_tokens=finish.completion_tokens,
        total_tokens=finish.prompt_tokens + finish.completion_tokens,
    )


def _tool_call(request_id: str, call: Call) -> dict[str, Any]:
    return {
        "id": f"{request_id}_tool_call_{call.index}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
