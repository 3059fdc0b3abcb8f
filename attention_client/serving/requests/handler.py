"""Common part of the attention client's two generating handlers: from an HTTP body to the answer."""

from __future__ import annotations

import asyncio
import json
import secrets
import uuid
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, ClassVar

from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from attention_client.serving.errors import ApiError
from attention_client.serving.families.markup import NO_MARKUP, Markup
from attention_client.serving.families.pieces import Finish, Reasoning, Served, Tokens
from attention_client.serving.families.reader import AnswerReader
from attention_client.serving.generation.engine import Work
from attention_client.serving.generation.sampling import Sampling
from attention_client.serving.grammars.guide import Grammar
from attention_client.serving.prompts.bodies import GenerationRequest, StreamOptions
from attention_client.serving.requests.answer import Answer
from attention_client.serving.requests.form import Form
from attention_client.serving.requests.generation import Generation, TextRules
from attention_client.serving.requests.ignored import ignored_header, log_ignored
from attention_client.serving.requests.logprobs import LogprobsForm, Scored
from attention_client.serving.requests.service import Service
from attention_client.serving.requests.token_texts import TokenTexts

__all__ = ["EventStream", "Handler"]

_GREEDY_BELOW = 1e-5  # temperature; scores divided by less overflow
_DONE = "data: [DONE]\n\n"
_MOST_PROMPT_TOKENS = 2**20  # of one request, each prompt counted once for each of its choices
_MOST_LOGPROBS = 2**20  # of one request
# More log-probabilities than this are formatted in a thread, so that they delay no other request.
_AT_ONCE = 2**10
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class EventStream(StreamingResponse):
    """Response of server-sent events that closes its generator at the end, which ends the generation.

    Each item of the generator is one event or several, whole: the connection sends comments in between. Its
    headers ask proxies to pass events on at once.
    """

    media_type = "text/event-stream"

    def init_headers(self, headers: Mapping[str, str] | None = None) -> None:
        """Set the response's headers."""
        super().init_headers({**_STREAM_HEADERS, **(headers or {})})

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
    # Whether prompts' token ids are in the choices, not beside them.
    prompt_by_choice: ClassVar[bool] = False

    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle_request(self, body: bytes, more: Callable[[int], None]) -> Response:
        """Answer one HTTP request, whole or as a stream. Raises ApiError before the generation begins.

        Args:
            body: The request's body.
            more: Counts the sequences beyond the first against the endpoint's limit (`Quota`).
        """
        request, answer = await self.answer(body)
        del body  # may be megabytes
        more(len(answer) - 1)
        headers = ignored_header(request.ignored)
        if request.stream:
            events = self._events(answer, request)
            return EventStream(events, headers=headers)
        pieces: list[list[Any]] = [[] for _ in range(len(answer))]
        async for index, piece in answer.pieces():
            pieces[index].append(piece)

        def response() -> JSONResponse:
            choices = [
                self._whole_choice(request, index, each) for index, each in enumerate(pieces)
            ]
            content: dict[str, Any] = {"choices": choices, "usage": answer.usage}
            if request.return_token_ids:
                for index in range(len(answer)):
                    holder = choices[index] if self.prompt_by_choice else content
                    holder["prompt_token_ids"] = answer.prompt_of(index)
            head = self._head(answer, self.answer_object)
            return JSONResponse(head | content, headers=headers)

        scored = [piece for each in pieces for piece in each if isinstance(piece, Scored)]
        return await asyncio.to_thread(response) if _is_long(scored) else response()

    def _whole_choice(
        self, request: GenerationRequest, index: int, pieces: list[Any]
    ) -> dict[str, Any]:
        *pieces, finish = pieces
        scored = [piece for piece in pieces if isinstance(piece, Scored)]
        tokens = [piece for piece in pieces if isinstance(piece, Tokens)]
        content = [
            piece
            for piece in pieces
            if not isinstance(piece, Scored | Tokens) and self._is_shown(request, piece)
        ]
        logprobs = self.logprobs_form(request).convert(Scored.joined(scored)) if scored else None
        return {
            "index": index,
            **self.whole(content),
            "logprobs": logprobs,
            "finish_reason": finish.reason,
            **_token_ids(request, tokens),
        }

    @staticmethod
    def _is_shown(request: Any, piece: Any) -> bool:
        return not isinstance(piece, Reasoning) or request.include_reasoning is not False

    async def answer(self, body: bytes) -> tuple[GenerationRequest, Answer]:
        """Parse a body from the API or the page's chat; return the request and its answer, not begun.

        Raises ApiError.
        """
        service = self._service
        service.check_engine()
        request, prompts = await service.prompts.read(self.request_class, body)
        service.check_name(request.model)
        log_ignored(request.ignored)
        self._check_size(request, prompts)
        form = self.form(request)
        grammar = None
        if form is not None:
            grammar = await service.grammars.compile(form.field, form.source)
        limits = self._limits(request, grammar)
        answer_id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        generations: list[Generation] = []
        for index, prompt in enumerate(prompts):
            rules = self._rules(request, self.echo(request, prompt, index))
            for choice in range(request.choices_per_prompt):
                work_id = f"{answer_id}-{len(generations)}" if generations else answer_id
                work = self._work(request, prompt, work_id, choice, limits)
                generations.append(
                    Generation(
                        service.engine,
                        work,
                        service.tokenizer,
                        rules,
                        self.reader(request, form),
                        service.metrics,
                    )
                )
        return request, Answer(answer_id, generations, sum(map(len, prompts)))

    def echo(self, request: Any, prompt: list[int], index: int) -> str | None:
        """Return the text that goes before each answer to the request's prompt `index`; None: no text."""
        return None

    @staticmethod
    @abstractmethod
    def default_tokens(of_model: int | None) -> int:
        """Return the most tokens of an answer to a request that names none, from the model's own default."""

    def token_texts(self, request: Any) -> TokenTexts:
        """Return the texts of tokens in log-probabilities."""
        service = self._service
        return service.numbered_texts if request.return_tokens_as_token_ids else service.token_texts

    @abstractmethod
    def logprobs_form(self, request: Any) -> LogprobsForm:
        """Return a new converter of one choice's log-probabilities."""

    def markup(self, request: Any) -> Markup:
        """Return the markup of answers."""
        return NO_MARKUP

    def form(self, request: Any) -> Form | None:
        """Return the form that all answers must have; None: any text."""
        constraint = request.constraint
        return None if constraint is None else Form.of(constraint)

    def reader(self, request: Any, form: Form | None) -> AnswerReader:
        """Return a new reader of one answer."""
        return AnswerReader(NO_MARKUP)

    def opening(self) -> dict[str, Any] | None:
        """Return the content of each choice's event before its first token; None: no such event."""
        return None

    @abstractmethod
    def chunk(self, piece: Any) -> dict[str, Any]:
        """Return the content of a choice in a stream's event, for a piece of the choice or its Finish."""

    @abstractmethod
    def whole(self, pieces: list[Any]) -> dict[str, Any]:
        """Return the content of a choice in an answer that is not streamed."""

    def _head(self, answer: Answer, kind: str) -> dict[str, Any]:
        service = self._service
        return {
            "id": answer.id,
            "object": kind,
            "created": service.clock(),
            "model": service.name,
        }

    async def _events(self, answer: Answer, request: GenerationRequest) -> AsyncIterator[str]:
        options = request.stream_options or StreamOptions()
        head = self._head(answer, self.chunk_object)
        forms = [self.logprobs_form(request) for _ in range(len(answer))]
        # The scores of tokens whose text is not complete yet.
        held: list[list[Scored]] = [[] for _ in forms]
        tokens: list[list[Tokens]] = [[] for _ in forms]
        prompts = set(range(len(forms))) if request.return_token_ids else set()

        def event(
            choices: list[dict[str, Any]], usage: dict[str, int] | None, **fields: Any
        ) -> str:
            data = head | {"choices": choices} | fields
            if options.include_usage:
                data["usage"] = usage
            return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"

        def usage_of(index: int) -> dict[str, int] | None:
            # As with OpenAI, only the last event has counts: clients add up all counts that they find.
            return answer.usage_of(index) if options.continuous_usage_stats else None

        def choice(index: int, content: dict[str, Any], reason: str | None = None) -> str:
            scored, held[index] = held[index], []
            logprobs = forms[index].convert(Scored.joined(scored)) if scored else None
            fields = {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}
            fields |= _token_ids(request, tokens[index])
            tokens[index] = []
            prompt = {"prompt_token_ids": answer.prompt_of(index)} if index in prompts else {}
            prompts.discard(index)
            if self.prompt_by_choice:
                fields, prompt = fields | prompt, {}
            return event([fields], usage_of(index), **prompt)

        opening = self.opening()
        if opening is not None:
            for index in range(len(answer)):
                yield choice(index, opening)
        try:
            async with aclosing(answer.pieces()) as pieces:  # type: ignore[type-var]
                async for index, piece in pieces:
                    if isinstance(piece, Scored):
                        held[index].append(piece)
                    elif isinstance(piece, Tokens):
                        tokens[index].append(piece)
                    elif isinstance(piece, Served):
                        # OpenAI's clients ignore unknown fields.
                        servers = dict(sorted(piece.servers.items()))
                        yield event([], usage_of(index), index=index, servers=servers)
                    elif self._is_shown(request, piece):
                        reason = piece.reason if isinstance(piece, Finish) else None
                        arguments = index, self.chunk(piece), reason
                        if _is_long(held[index]):
                            yield await asyncio.to_thread(choice, *arguments)
                        else:
                            yield choice(*arguments)
            if options.include_usage:
                yield event([], answer.usage)
        except ApiError as error:
            yield error.sse()
        yield _DONE

    def _check_size(self, request: GenerationRequest, prompts: list[list[int]]) -> None:
        """Refuse too many sequences, prompt tokens or log-probabilities. Raises ApiError (400)."""
        per_prompt, most = request.choices_per_prompt, self._service.max_sequences
        field = "n" if len(prompts) == 1 else "prompt"
        sequences, tokens = len(prompts) * per_prompt, sum(map(len, prompts)) * per_prompt
        if sequences > most:
            raise ApiError.invalid(
                field, f"'{field}': asks for {sequences} sequences; the limit is {most}."
            )
        if sequences > 1 and tokens > _MOST_PROMPT_TOKENS:
            raise ApiError.invalid(
                field,
                f"'{field}': the prompts of all sequences have {tokens} tokens; the limit is "
                f"{_MOST_PROMPT_TOKENS}.",
            )
        if request.likeliest is None:
            return
        scored = sum(self._budget(request, prompt) for prompt in prompts) * per_prompt
        if self.scores_prompts(request):
            scored += tokens
        logprobs = scored * (request.likeliest + 1)
        if logprobs > _MOST_LOGPROBS:
            raise ApiError.invalid(
                "logprobs",
                f"'logprobs': up to {logprobs} log-probabilities; the limit is {_MOST_LOGPROBS}. Ask for "
                "fewer tokens, sequences or likeliest tokens.",
            )

    def scores_prompts(self, request: Any) -> bool:
        """Whether the answer has the log-probabilities of the prompts."""
        return False

    def _rules(self, request: GenerationRequest, echo: str | None) -> TextRules:
        return TextRules(
            stops=tuple(request.stop),
            includes_stop=bool(request.include_stop_str_in_output),
            skips_special=request.skips_special,
            marked=self.markup(request).tokens,
            echo=echo,
            is_empty=request.token_budget == 0,
            names_tool=request.names_tool,
            token_ids=bool(request.return_token_ids),
        )

    def _limits(self, request: GenerationRequest, grammar: Grammar | None) -> Sampling:
        """Return the settings that ban tokens; of bad words those at a text's start and after a space."""
        words = [word.lstrip() or word for word in request.bad_words or ()]
        texts = [text for word in words for text in (word, f" {word}")]
        found = (
            self._service.tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        )
        return Sampling(
            grammar=grammar,
            allowed_tokens=tuple(request.allowed_token_ids) if request.allowed_token_ids else None,
            bad_words=tuple(tuple(tokens) for tokens in found if tokens),
        )

    def _budget(self, request: GenerationRequest, prompt: list[int]) -> int:
        budget = request.token_budget
        if budget is None:
            service = self._service
            wanted = self.default_tokens(service.defaults.max_tokens)
            return min(wanted, service.max_model_len - len(prompt))
        return budget

    def _work(
        self,
        request: GenerationRequest,
        prompt: list[int],
        work_id: str,
        choice: int,
        limits: Sampling,
    ) -> Work:
        service, options = self._service, request.stream_options
        budget = self._budget(request, prompt)
        if request.min_tokens is not None and request.min_tokens > budget:
            raise ApiError.invalid(
                "min_tokens",
                f"min_tokens ({request.min_tokens}) is larger than max_tokens ({budget}).",
            )
        stops = tuple(request.stop_token_ids or ())
        # A grammar decides where the answer may end.
        ignores_end = request.ignore_eos and limits.grammar is None
        return Work(
            id=work_id,
            prompt=prompt,
            max_tokens=max(1, budget),  # the engine processes a prompt to its first token
            end_tokens=stops if ignores_end else (*service.defaults.end_tokens, *stops),
            sampling=self._sampling(request, len(prompt), choice, limits),
            min_tokens=request.min_tokens or 0,
            servers=bool(options is not None and options.include_servers),
        )

    def _sampling(
        self,
        request: GenerationRequest,
        prompt_length: int,
        choice: int,
        limits: Sampling,
    ) -> Sampling:
        defaults = self._service.defaults.sampling
        ends = self._service.defaults.end_tokens
        temperature = request.temperature
        if temperature is None:
            asked = (request.top_p, request.top_k, request.min_p)
            asks = any(each is not None for each in asked)
            temperature = defaults.temperature or (1.0 if asks else 0.0)
        return replace(
            limits,
            temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
            top_p=defaults.top_p if request.top_p is None else request.top_p,
            top_k=defaults.top_k if request.top_k is None else max(request.top_k, 0),
            min_p=defaults.min_p if request.min_p is None else request.min_p,
            seed=secrets.randbits(63) if request.seed is None else request.seed + choice,
            prompt_length=prompt_length,
            min_length=prompt_length + request.min_tokens if request.min_tokens else 0,
            end_tokens=(*ends, *(request.stop_token_ids or ())),
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            repetition_penalty=request.repetition_penalty or defaults.repetition_penalty,
            logit_bias=tuple(request.biased_tokens.items()),
            logprobs=request.likeliest,
            prompt_logprobs=self.scores_prompts(request),
        )


def _token_ids(request: GenerationRequest, pieces: Sequence[Tokens]) -> dict[str, Any]:
    ids = [token for piece in pieces for token in piece.ids]
    return {"token_ids": ids} if request.return_token_ids else {}


def _is_long(scored: Sequence[Scored]) -> bool:
    return sum(part.scores.top_TK.size + len(part.tokens) for part in scored) > _AT_ONCE
