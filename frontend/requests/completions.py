"""Handlers of /v1/chat/completions and /v1/completions, from an HTTP body to the answer.

The other generating paths have the chat handler's first half: the body becomes the engine's work.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import uuid
from abc import abstractmethod
from array import array
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from eaas.generation.errors import ApiError
from eaas.generation.grammar import Grammar
from eaas.generation.sampling import Sampling
from eaas.generation.work import Work
from frontend.defaults import SHARED_SETTINGS, Defaults
from frontend.errors import error_event
from frontend.families.reader import Call, Reasoning
from frontend.prompts.bodies import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    StreamOptions,
)
from frontend.requests.form import Form, chat_form
from frontend.requests.generation import Answer, Finish, Generation, Served
from frontend.requests.logprobs import (
    CompletionLogprobs,
    LogprobsForm,
    TokenTexts,
    chat_logprobs,
)
from frontend.requests.service import More, Service

__all__ = ["ChatHandler", "EventStream", "Handler", "TextHandler"]

# More log-probabilities than this are formatted in a thread, so that they delay no other request.
_AT_ONCE = 2**10
_GREEDY_BELOW = 1e-5  # temperature; scores divided by less overflow
_MOST_PROMPT_TOKENS = 2**20  # of one request, each prompt counted once for each of its choices
_MOST_LOGPROBS = 2**20  # of one request
_CUTS = {"top_p", "top_k", "min_p"}
_SAME_NAMES = SHARED_SETTINGS | {"presence_penalty", "frequency_penalty"}
_DONE = "data: [DONE]\n\n"
# They ask proxies to pass events on at once.
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class EventStream(StreamingResponse):
    """Response of server-sent events about an answer, which it begins at once and ends at the end.

    An engine computes while the head of the response is sent, and what it refuses gets an HTTP status.
    Each item of the generator is one event or several, whole: the connection sends comments in between.

    Raises ApiError: the answer cannot begin.
    """

    media_type = "text/event-stream"

    def __init__(
        self, answer: Answer, events: AsyncIterator[str], headers: Mapping[str, str]
    ) -> None:
        super().__init__(events, headers={**_STREAM_HEADERS, **headers})
        self._answer = answer
        answer.begin()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            async with aclosing(self.body_iterator):  # type: ignore[type-var]
                await super().__call__(scope, receive, send)
        finally:
            self._answer.end()


class Handler:
    """Turns a request's body into the engine's work, and the generated pieces into OpenAI's answer."""

    request_class: ClassVar[type[GenerationRequest]]
    id_prefix: ClassVar[str]
    answer_object: ClassVar[str]
    chunk_object: ClassVar[str]
    # The content of each choice's event before its first token; None: no such event.
    opening: ClassVar[dict[str, Any] | None] = None
    # Whether prompts' token ids are in the choices, not beside them.
    prompt_by_choice: ClassVar[bool] = False
    # Most tokens of an answer if neither the request nor the model says so.
    usual_tokens: ClassVar[int] = 1024

    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle_request(self, body: bytes, more: More) -> Response:
        """Answer one HTTP request, whole or as a stream. Raises ApiError before the generation begins."""
        request, answer = await self.answer(body)
        del body  # may be megabytes
        more(len(answer.generations) - 1)
        return await self.respond(request, answer)

    async def answer(self, body: bytes) -> tuple[GenerationRequest, Answer]:
        """Parse a body from the API or the page's chat; return the request and its answer, not begun.

        Raises ApiError.
        """
        service = self._service
        service.check_engine()
        request, prompts = await service.read(self.request_class, body)
        lengths, limit = list(map(len, prompts)), request.token_budget
        budgets = [limit or 0] * len(prompts)
        if limit is None:
            most, room = self.default_tokens(request), service.max_model_len
            budgets = [min(most, room - length) for length in lengths]
        _check_size(request, lengths, budgets, service.max_sequences)
        form, grammar = self.form(request), None
        if form.source is not None:
            grammar = await service.grammars.compile(form.field, form.source)
        sampling = _sampling_of(request, service.defaults, service.tokenizer, grammar)
        # A grammar decides where the answer may end.
        ignores_end = request.ignore_eos and grammar is None
        end_tokens = tuple(request.stop_token_ids or ()) if ignores_end else sampling.end_tokens
        options = request.stream_options
        answer_id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        generations: list[Generation] = []
        for index, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True)):
            echo = request.echoed[index] if request.echoed else None
            tokens = array("I", prompt)
            for choice in range(request.n or 1):
                seed = secrets.randbits(63) if request.seed is None else request.seed + choice
                work = Work(
                    id=f"{answer_id}-{len(generations)}" if generations else answer_id,
                    tokens=tokens,
                    prompt_length=len(prompt),
                    max_tokens=max(1, budget),  # the engine processes a prompt to its first token
                    end_tokens=end_tokens,
                    sampling=replace(sampling, seed=seed),
                    servers=bool(options is not None and options.include_servers),
                )
                generations.append(Generation(service, request, form, work, echo))
        return request, Answer(answer_id, generations, sum(lengths))

    def default_tokens(self, request: Any) -> int:
        """Return the most tokens of an answer to a request that names none, if there is room."""
        return self._service.defaults.max_tokens or self.usual_tokens

    def form(self, request: Any) -> Form:
        """Return the form that all answers must have."""
        return Form.of(request.constraint)

    @abstractmethod
    def logprobs_form(self, request: Any, texts: TokenTexts) -> LogprobsForm:
        """Return a new converter of one choice's log-probabilities."""

    @abstractmethod
    def chunk(self, piece: Any) -> dict[str, Any]:
        """Return the content of a choice in a stream's event, for a piece of the choice or its Finish."""

    @abstractmethod
    def whole(self, pieces: list[Any]) -> dict[str, Any]:
        """Return the content of a choice in an answer that is not streamed."""

    async def respond(self, request: GenerationRequest, answer: Answer) -> Response:
        """Return the answer to a request. Raises ApiError."""
        headers = request.ignored_header
        numbered, service = request.return_tokens_as_token_ids, self._service
        texts = service.numbered_texts if numbered else service.token_texts
        forms = [self.logprobs_form(request, texts) for _ in answer.generations]

        def part(index: int, content: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
            """Return a part of a choice, with the tokens that came since the part before."""
            generation = answer.generations[index]
            scored = generation.take_scored()
            logprobs = None if scored is None else forms[index](scored)
            found = {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}
            return found | (generation.take_ids() if request.return_token_ids else {})

        if request.stream:
            options = request.stream_options or StreamOptions()
            return EventStream(answer, self._events(answer, part, options), headers)
        pieces: list[list[Any]] = [[] for _ in forms]
        async for index, piece in answer.pieces():
            pieces[index].append(piece)

        def whole() -> dict[str, Any]:
            parts = [
                part(index, self.whole(content), finish.reason)
                for index, (*content, finish) in enumerate(pieces)
            ]
            return self._object(answer, self.answer_object, parts) | {"usage": answer.usage()}

        return JSONResponse(await _unhurried(answer.generations, whole), headers=headers)

    def _object(self, answer: Answer, kind: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
        data = {"id": answer.id, "object": kind, "created": answer.created}
        data |= {"model": self._service.name, "choices": parts}
        if not self.prompt_by_choice:  # all choices have one prompt
            for part in parts:
                data |= {name: part.pop(name) for name in part.keys() & {"prompt_token_ids"}}
        return data

    async def _events(
        self, answer: Answer, part: Callable[..., dict[str, Any]], options: StreamOptions
    ) -> AsyncIterator[str]:
        def event(of: int | None, parts: list[dict[str, Any]], **fields: Any) -> str:
            data = self._object(answer, self.chunk_object, parts) | fields
            if options.include_usage:
                # As with OpenAI, only the last event has counts: clients add up all counts that they find.
                counts = of is None or options.continuous_usage_stats
                data["usage"] = answer.usage(of) if counts else None
            return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"

        if self.opening is not None:
            for index in range(len(answer.generations)):
                yield event(index, [part(index, self.opening)])
        try:
            async with aclosing(answer.pieces()) as pieces:  # type: ignore[type-var]
                async for index, piece in pieces:
                    if isinstance(piece, Served):
                        # OpenAI's clients ignore unknown fields.
                        servers = dict(sorted(piece.servers.items()))
                        yield event(index, [], index=index, servers=servers)
                        continue
                    reason = piece.reason if isinstance(piece, Finish) else None
                    make = partial(part, index, self.chunk(piece), reason)
                    yield event(index, [await _unhurried([answer.generations[index]], make)])
            if options.include_usage:
                yield event(None, [])
        except ApiError as error:
            yield error_event(error)
        yield _DONE


class ChatHandler(Handler):
    """Handler of /v1/chat/completions: answers as chat messages, with reasoning and tool calls."""

    request_class = ChatRequest
    id_prefix = "chatcmpl"
    answer_object, chunk_object = "chat.completion", "chat.completion.chunk"
    opening: ClassVar = {"delta": {"role": "assistant", "content": ""}}

    def form(self, request: ChatRequest) -> Form:
        """Return the form that the answer must have, a constraint or tool calls."""
        letters = request.constraint is not None and request.constraint.is_raw
        markup = self._service.markup(skips_special=request.skips_special, letters=letters)
        return chat_form(request, markup)

    def logprobs_form(self, request: ChatRequest, texts: TokenTexts) -> LogprobsForm:
        """Return a new converter of one choice's log-probabilities."""
        return partial(chat_logprobs, texts)

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


class TextHandler(Handler):
    """Handler of /v1/completions: answers as plain text."""

    request_class = CompletionRequest
    id_prefix = "cmpl"
    answer_object = chunk_object = "text_completion"
    prompt_by_choice = True
    usual_tokens = 16

    def default_tokens(self, request: CompletionRequest) -> int:
        """Return OpenAI's default, 16, or the model's if it is less."""
        return min(super().default_tokens(request), self.usual_tokens)

    def logprobs_form(self, request: CompletionRequest, texts: TokenTexts) -> LogprobsForm:
        """Return a new converter of one choice's log-probabilities."""
        return CompletionLogprobs(texts, skips_special=request.skips_special)

    def chunk(self, piece: Any) -> dict[str, Any]:
        """Convert a piece of a choice, or its Finish, to the content of the choice in a stream's event."""
        return {"text": "" if isinstance(piece, Finish) else piece}

    def whole(self, pieces: list[Any]) -> dict[str, Any]:
        """Join all pieces to the text of a choice that is not streamed."""
        return {"text": "".join(pieces)}


def _tool_call(call: Call) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


async def _unhurried(generations: Sequence[Generation], make: Callable[[], Any]) -> Any:
    """Call a function that takes the scores of generations, in a thread if it has to format many."""
    is_long = sum(each.log_probabilities for each in generations) > _AT_ONCE
    return await asyncio.to_thread(make) if is_long else make()


def _check_size(
    request: GenerationRequest, lengths: list[int], budgets: list[int], most: int
) -> None:
    """Refuse too many sequences, prompt tokens or log-probabilities. Raises ApiError (400).

    Args:
        request: The request.
        lengths: Tokens of each prompt.
        budgets: Most tokens of an answer to each prompt.
        most: Most sequences.
    """
    times, field = request.n or 1, "n" if len(lengths) == 1 else "prompt"
    sequences, tokens = len(lengths) * times, sum(lengths) * times
    if sequences > most:
        reason = f"'{field}': asks for {sequences} sequences; the limit is {most}."
        raise ApiError.invalid(field, reason)
    if sequences > 1 and tokens > _MOST_PROMPT_TOKENS:
        raise ApiError.invalid(
            field,
            f"'{field}': the prompts of all sequences have {tokens} tokens; the limit is "
            f"{_MOST_PROMPT_TOKENS}.",
        )
    least = request.min_tokens or 0
    if least > min(budgets):
        reason = f"min_tokens ({least}) is larger than max_tokens ({min(budgets)})."
        raise ApiError.invalid("min_tokens", reason)
    likeliest = -1 if request.likeliest is None else request.likeliest
    scored = sum(budgets) + (sum(lengths) if _scores_prompts(request) else 0)
    logprobs = scored * times * (likeliest + 1)
    if logprobs > _MOST_LOGPROBS:
        raise ApiError.invalid(
            "logprobs",
            f"'logprobs': up to {logprobs} log-probabilities; the limit is {_MOST_LOGPROBS}. Ask for "
            "fewer tokens, sequences or likeliest tokens.",
        )


def _sampling_of(
    request: GenerationRequest, defaults: Defaults, tokenizer: Any, grammar: Grammar | None
) -> Sampling:
    """Return the settings that all sequences of a request have."""
    given = request.model_dump(include=_SAME_NAMES, exclude_none=True)
    if given.keys() & _CUTS and not defaults.sampling.temperature:
        given = {"temperature": 1.0} | given
    sampling = replace(defaults.sampling, **given)
    # Bad words at a text's start and after a space.
    words = [word.lstrip() or word for word in request.bad_words or ()]
    texts = [text for word in words for text in (word, f" {word}")]
    found = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    return replace(
        sampling,
        temperature=sampling.temperature if sampling.temperature >= _GREEDY_BELOW else 0.0,
        top_k=max(sampling.top_k, 0),
        min_tokens=request.min_tokens or 0,
        end_tokens=(*defaults.end_tokens, *(request.stop_token_ids or ())),
        logit_bias=tuple((int(token), bias) for token, bias in (request.logit_bias or {}).items()),
        logprobs=request.likeliest,
        prompt_logprobs=_scores_prompts(request),
        grammar=grammar,
        allowed_tokens=tuple(request.allowed_token_ids) if request.allowed_token_ids else None,
        bad_words=tuple(tuple(tokens) for tokens in found if tokens),
    )


def _scores_prompts(request: GenerationRequest) -> bool:
    echoes = isinstance(request, CompletionRequest) and bool(request.echo)
    return echoes and request.likeliest is not None
