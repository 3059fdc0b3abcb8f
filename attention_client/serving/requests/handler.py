"""The common part of the two generating endpoints."""

from __future__ import annotations

import json
import secrets
import uuid
from abc import abstractmethod
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, ClassVar

from fastapi.responses import JSONResponse, Response, StreamingResponse
from openai.types import CompletionUsage
from starlette.types import Receive, Scope, Send

from attention_client.serving.errors import ApiError
from attention_client.serving.generation.engine import Work
from attention_client.serving.generation.sampling import Sampling
from attention_client.serving.prompts.bodies import GenerationRequest
from attention_client.serving.requests.generation import Finish, Generation, Served
from attention_client.serving.requests.service import Service

__all__ = ["Handler", "usage_of"]

_GREEDY_BELOW = 1e-5  # temperature; scores divided by less overflow
_DONE = "data: [DONE]\n\n"


class _EventStream(StreamingResponse):
    """Server-sent events. Closes the generator at the end of the response."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.body_iterator):  # type: ignore[type-var]
            await super().__call__(scope, receive, send)


class Handler:
    """Base class of a generating endpoint."""

    request_class: ClassVar[type[GenerationRequest]]
    id_prefix: ClassVar[str]
    chunk_object: ClassVar[str]
    default_tokens: ClassVar[int]

    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle_request(self, body: bytes) -> Response:
        """Answer one request. Raises ApiError before the generation begins."""
        service = self._service
        service.check_engine()
        request, prompt = await service.prompts.read(self.request_class, body)
        del body  # may be megabytes
        service.check_name(request.model)
        work = self._work(request, prompt)
        parser = self.parser(request, prompt)
        generation = Generation(
            service.engine, work, service.tokenizer, request.stop, parser, service.metrics
        )
        if request.stream:
            return _EventStream(self._events(generation, request), media_type="text/event-stream")
        pieces = [piece async for piece in generation.pieces()]
        return JSONResponse(self.answer(generation.id, pieces[:-1], pieces[-1]))

    def parser(self, request: Any, prompt: list[int]) -> Any | None:
        """Return the parser that splits the answer into reasoning, tool calls and text; None: no parser."""
        return None

    def opening(self) -> list[dict[str, Any]]:
        """Return the choices of the events before the first token."""
        return []

    @abstractmethod
    def choice(self, request_id: str, piece: Any) -> dict[str, Any]:
        """Return the choice of the event for a piece of the answer or for its Finish."""

    @abstractmethod
    def answer(self, request_id: str, pieces: list[Any], finish: Finish) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""

    async def _events(
        self, generation: Generation, request: GenerationRequest
    ) -> AsyncIterator[str]:
        options = request.stream_options
        counted = options is not None and bool(options.include_usage)
        running = options is not None and counted and bool(options.continuous_usage_stats)
        common = {
            "id": generation.id,
            "object": self.chunk_object,
            "created": self._service.clock(),
            "model": self._service.name,
        }

        def event(
            choices: list[dict[str, Any]], *, last: bool = False, **fields: dict[str, int]
        ) -> str:
            data: dict[str, Any] = common | {"choices": choices} | fields
            if counted:
                # As with OpenAI, only the last event has counts: clients add up all counts that they find.
                data["usage"] = None
                if last or running:
                    data["usage"] = usage_of(generation).model_dump(exclude_none=True)
            return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"

        for choice in self.opening():
            yield event([choice])
        try:
            async with aclosing(generation.pieces()) as pieces:  # type: ignore[type-var]
                async for piece in pieces:
                    if isinstance(piece, Served):
                        # OpenAI's clients ignore unknown fields.
                        yield event([], servers=dict(sorted(piece.servers.items())))
                    else:
                        yield event([self.choice(generation.id, piece)])
            if counted:
                yield event([], last=True)
        except ApiError as error:
            yield error.sse()
        yield _DONE

    def _work(self, request: GenerationRequest, prompt: list[int]) -> Work:
        service, options = self._service, request.stream_options
        budget = request.token_budget
        if budget is None:
            budget = min(self.default_tokens, service.max_model_len - len(prompt))
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
            min_tokens=request.min_tokens or 0,
            servers=bool(options is not None and options.include_servers),
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


def usage_of(counts: Finish | Generation) -> CompletionUsage:
    """The token counts in OpenAI's form."""
    return CompletionUsage(
        prompt_tokens=counts.prompt_tokens,
        completion_tokens=counts.completion_tokens,
        total_tokens=counts.prompt_tokens + counts.completion_tokens,
    )
