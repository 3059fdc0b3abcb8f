"""Common part of the attention client's two generating handlers: from an HTTP body to the answer."""

from __future__ import annotations

import json
import secrets
import uuid
from abc import abstractmethod
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, ClassVar

from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from attention_client.serving.errors import ApiError
from attention_client.serving.generation.engine import Work
from attention_client.serving.generation.sampling import Sampling
from attention_client.serving.prompts.bodies import GenerationRequest, StreamOptions
from attention_client.serving.requests.form import Form
from attention_client.serving.requests.generation import Generation, Served
from attention_client.serving.requests.ignored import ignored_header, log_ignored
from attention_client.serving.requests.service import Service

__all__ = ["EventStream", "Handler"]

_GREEDY_BELOW = 1e-5  # temperature; scores divided by less overflow
_DONE = "data: [DONE]\n\n"


class EventStream(StreamingResponse):
    """Response of server-sent events that closes its generator at the end, which ends the generation."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        async with aclosing(self.body_iterator):  # type: ignore[type-var]
            await super().__call__(scope, receive, send)


class Handler:
    """Turns a request's body into the engine's work, and the generated pieces into OpenAI's answer."""

    request_class: ClassVar[type[GenerationRequest]]
    id_prefix: ClassVar[str]
    answer_object: ClassVar[str]
    chunk_object: ClassVar[str]
    default_tokens: ClassVar[int]

    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle_request(self, body: bytes) -> Response:
        """Answer one HTTP request, whole or as a stream. Raises ApiError before the generation begins."""
        request, generation = await self.generation(body)
        del body  # may be megabytes
        headers = ignored_header(request.ignored)
        if request.stream:
            events = self._events(generation, request)
            return EventStream(events, media_type="text/event-stream", headers=headers)
        *pieces, finish = [piece async for piece in generation.pieces()]
        choice = {"index": 0, "finish_reason": finish.reason, **self.whole(generation.id, pieces)}
        answer = {"choices": [choice], "usage": generation.usage}
        head = self._head(generation, self.answer_object)
        return JSONResponse(head | answer, headers=headers)

    async def generation(self, body: bytes) -> tuple[GenerationRequest, Generation]:
        """Parse a body from the API or the page's chat; return the request and its generation, not begun.

        Raises ApiError.
        """
        service = self._service
        service.check_engine()
        request, prompt = await service.prompts.read(self.request_class, body)
        service.check_name(request.model)
        log_ignored(request.ignored)
        work = self._work(request, prompt)
        parser = self.parser(request, prompt)
        form = self.form(request, parser)
        if form is not None:
            grammar = await service.grammars.compile(form.field, form.source)
            # The grammar decides where the answer may end.
            sampling = replace(work.sampling, grammar=grammar)
            work = replace(work, end_tokens=service.end_tokens, sampling=sampling)
        return request, Generation(
            service.engine,
            work,
            service.tokenizer,
            request.stop,
            parser,
            service.metrics,
            form,
        )

    def parser(self, request: Any, prompt: list[int]) -> Any | None:
        """Return the parser that splits the answer into reasoning, tool calls and text; None: no parser."""
        return None

    def form(self, request: Any, parser: Any | None) -> Form | None:
        """Return the form that the answer must have; None: any text."""
        constraint = request.constraint
        return None if constraint is None else Form.of(constraint)

    def opening(self) -> list[dict[str, Any]]:
        """Return the choices of the events that a stream sends before the first token."""
        return []

    @abstractmethod
    def chunk(self, request_id: str, piece: Any) -> dict[str, Any]:
        """Return the choice of a stream's event for a piece of the answer or its Finish."""

    @abstractmethod
    def whole(self, request_id: str, pieces: list[Any]) -> dict[str, Any]:
        """Return the content of the only choice of an answer that is not streamed."""

    def _head(self, generation: Generation, kind: str) -> dict[str, Any]:
        service = self._service
        return {
            "id": generation.id,
            "object": kind,
            "created": service.clock(),
            "model": service.name,
        }

    async def _events(
        self, generation: Generation, request: GenerationRequest
    ) -> AsyncIterator[str]:
        options = request.stream_options or StreamOptions()
        head = self._head(generation, self.chunk_object)

        def event(choices: list[dict[str, Any]], *, last: bool = False, **fields: Any) -> str:
            data = head | {"choices": choices} | fields
            if options.include_usage:
                # As with OpenAI, only the last event has counts: clients add up all counts that they find.
                is_counted = last or options.continuous_usage_stats
                data["usage"] = generation.usage if is_counted else None
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
                        yield event([self.chunk(generation.id, piece)])
            if options.include_usage:
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
            raise ApiError.invalid(
                "min_tokens",
                f"min_tokens ({request.min_tokens}) is larger than max_tokens ({budget}).",
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
