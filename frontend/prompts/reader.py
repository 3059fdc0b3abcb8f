"""Converts a request's body to settings and prompt tokens, in the endpoint or in its prompt worker."""

from __future__ import annotations

import functools
import inspect
import json
from dataclasses import dataclass
from typing import Any

import jinja2

from eaas.checkpoint.chat_templates import DEFAULT, no_default
from eaas.generation.errors import ApiError
from frontend.prompts.bodies import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from frontend.prompts.body import RequestT, load_json
from frontend.prompts.history import History, history_form, is_plain
from frontend.prompts.responses_body import ResponsesRequest

__all__ = ["ModelLimits", "PromptReader", "missing_template"]

_BEGINNING = 16  # characters for each token that fits; a usual text has four or five
_MOST_CHARACTERS = 4 * 2**20  # of a text from tokens; a token may be hundreds of characters
_TOOLS_BYTES = 256 * 2**10  # the response parser reads the tools again, in the endpoint's process


@dataclass(frozen=True)
class ModelLimits:
    """Limits of a request's prompt, from the model.

    Attributes:
        max_model_len: Most tokens of one request, prompt plus answer.
        vocabulary: Size of the vocabulary; all token ids are below it.
    """

    max_model_len: int
    vocabulary: int


class PromptReader:
    """Parses a request's body, applies the chat template and tokenizes the prompt.

    Args:
        tokenizer: A transformers tokenizer.
        limits: Limits of prompts.
    """

    def __init__(self, tokenizer: Any, limits: ModelLimits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._history_form = functools.cache(self._find_history_form)

    def read(self, cls: type[RequestT], body: bytes) -> tuple[RequestT, list[list[int]]]:
        """Return the validated request and the tokens of its prompts.

        The prompts of a generation leave room for its answer. Raises ApiError (400).
        """
        request = cls.read(load_json(body))
        if isinstance(request, TokenizeRequest):
            # Without a limit of tokens: the client may ask whether a prompt is too long.
            text = self._render(request) if request.prompt is None else request.prompt
            return request, [self._tokens(text, request.adds_special_tokens)]
        if isinstance(request, DetokenizeRequest):
            self._check_vocabulary(request.tokens, "tokens")
            text = request.found["text"] = str(self._tokenizer.decode(request.tokens))
            if len(text) > _MOST_CHARACTERS:
                reason = f"the text has {len(text)} characters; the limit is {_MOST_CHARACTERS}."
                raise ApiError.invalid("tokens", f"'tokens': {reason}")
            return request, []
        assert isinstance(request, GenerationRequest)
        for field in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            self._check_vocabulary([int(token) for token in getattr(request, field) or ()], field)
        if isinstance(request, ChatRequest):
            if isinstance(request, ResponsesRequest) and request.repeated["truncation"] == "auto":
                return request, [request.fitted(self._chat_prompt)]
            return request, [self._chat_prompt(request)]
        assert isinstance(request, CompletionRequest)
        adds = request.add_special_tokens is not False
        prompts = [self._prompt(given, "prompt", request, adds) for given in request.prompt]
        if request.echo:
            request.found["texts"] = [
                given
                if isinstance(given, str)
                else self._tokenizer.decode(given, skip_special_tokens=request.skips_special)
                for given in request.prompt
            ]
        return request, prompts

    def _chat_prompt(self, request: ChatRequest) -> list[int]:
        # The template contains the special tokens, unless the client says otherwise.
        adds = bool(request.add_special_tokens)
        return self._prompt(self._render(request), request.messages_field, request, adds)

    def _render(self, request: ChatRequest | TokenizeRequest) -> str:
        """Apply the chat template, and note what of its text begins the answer."""
        self._check_template(request)
        tools, extra = request.offered_tools, request.template_variables
        reserved = (
            inspect.signature(self._tokenizer.apply_chat_template).parameters.keys() & extra.keys()
        )
        if reserved:
            raise ApiError.invalid(
                "chat_template_kwargs", f"chat_template_kwargs must not hold {sorted(reserved)}."
            )
        messages = [message.for_template() for message in request.messages or ()]
        if not is_plain(messages):
            messages = self._history_form(tools is not None).of(messages)
        apply = functools.partial(
            _rendered, self._tokenizer, request.messages_field, messages,
            tools=tools, documents=request.documents or None,
            continue_final_message=bool(request.continue_final_message), **extra,
        )  # fmt: skip
        text = apply(add_generation_prompt=request.opens_answer)
        if isinstance(request, ChatRequest):
            last = messages[-1]["content"] or ""
            closed = apply(add_generation_prompt=False) if request.opens_answer else text
            request.found["opening"] = (
                last if request.continue_final_message else _after(text, closed, last)
            )
            request.found["earlier_calls"] = sum(len(m.tool_calls or ()) for m in request.messages)
            if request.echo and messages[-1]["role"] == "assistant":
                request.found["texts"] = [last]
        return text

    def _find_history_form(self, tools: bool) -> History:
        """Find the form of histories of the template for chats with tools, or without."""
        fields: dict[str, Any] = {"tools": [] if tools else None, "add_generation_prompt": True}
        return history_form(functools.partial(_rendered, self._tokenizer, "messages", **fields))

    def _check_template(self, request: ChatRequest | TokenizeRequest) -> None:
        """Refuse what the template does not have."""
        tools = request.offered_tools
        if missing := missing_template(self._tokenizer, tools=tools is not None):
            raise ApiError(400, missing)
        template = self._tokenizer.get_chat_template(tools=tools)
        # A grammar makes any model call a tool that the request chose.
        is_forced = isinstance(request, ChatRequest) and bool(request.forced_tools)
        free_tools = None if is_forced else tools
        for field, given in (("tools", free_tools), ("documents", request.documents)):
            if given and field not in template:
                reason = f"This model's chat template has no {field}."
                raise ApiError.invalid(field, reason, "unsupported_parameter")
        size = len(json.dumps(tools))
        if size > _TOOLS_BYTES:
            raise ApiError.invalid(
                "tools", f"'tools': {size} bytes of JSON; the limit is {_TOOLS_BYTES} bytes."
            )

    def _tokens(self, text: str, adds_special_tokens: bool) -> list[int]:
        encoded = self._tokenizer(
            text,
            add_special_tokens=adds_special_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # no warning for a long text
        )
        return list(encoded["input_ids"])

    def _prompt(
        self, given: str | list[int], field: str, request: GenerationRequest, adds: bool
    ) -> list[int]:
        """Return a prompt's tokens, which are in the vocabulary and leave room for the answer."""
        # A text that is far too long is refused by its beginning, since megabytes take seconds. Half of the
        # beginning's tokens are certain: some tokenizers would write it with fewer if the text went on.
        beginning, wanted = _BEGINNING * self._limits.max_model_len, request.token_budget or 1
        if isinstance(given, str):
            if len(given) > beginning:
                least = len(self._tokens(given[:beginning], adds)) // 2
                self._check_room(least, field, wanted, "at least ")
            given = self._tokens(given, adds)
        self._check_room(len(given), field, wanted)
        if not given:
            raise ApiError.invalid(field, f"'{field}': has no tokens.")
        self._check_vocabulary(given, field)
        return given

    def _check_vocabulary(self, tokens: list[int], field: str) -> None:
        wrong = next((token for token in tokens if not 0 <= token < self._limits.vocabulary), None)
        if wrong is not None:
            reason = f"token {wrong} is not one of the model's {self._limits.vocabulary}."
            raise ApiError.invalid(field, f"'{field}': {reason}")

    def _check_room(self, count: int, field: str, wanted: int, about: str = "") -> None:
        most = self._limits.max_model_len
        if count + wanted > most:
            raise ApiError.invalid(
                field,
                f"This model's maximum context length is {most} tokens. However, you requested "
                f"{about}{count + wanted} tokens ({about}{count} in the prompt, {wanted} in the answer). "
                "Shorten the prompt or lower max_tokens.",
                "context_length_exceeded",
            )


def _after(text: str, closed: str, last: str) -> str:
    """Return the end of a prompt that begins the answer: the template's own words, no user's.

    Args:
        text: The prompt.
        closed: The prompt without the beginning of the answer; some templates begin it in any case.
        last: The text of the last message.
    """
    if closed != text and text.startswith(closed):
        return text[len(closed) :]
    _, found, end = text.rpartition(last.strip()) if last.strip() else ("", "", "")
    return end if found else ""


def missing_template(tokenizer: Any, *, tools: bool = False) -> str:
    """Say why a tokenizer has no template for chats, with tools or without; empty if it has one."""
    template = tokenizer.chat_template
    if not template:
        return "This model has no chat template. Use /v1/completions instead."
    usable = {DEFAULT, "tool_use"} if tools else {DEFAULT}
    if isinstance(template, dict) and not usable & template.keys():
        return no_default(list(template))
    return ""


def _rendered(tokenizer: Any, field: str, messages: list[dict[str, Any]], **arguments: Any) -> str:
    """Make the text of a prompt.

    Args:
        tokenizer: A transformers tokenizer.
        field: The request's field with the messages.
        messages: In the form of chat templates.
        arguments: Of `render_jinja_template`, and the template's variables.

    Raises ApiError (400): the template refuses the messages, or its code fails.
    """
    # The prompt worker hides torch before transformers is imported.
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        # Not `apply_chat_template`: it drops a content of None, for which some templates ask.
        (text,), _ = render_jinja_template(
            conversations=[messages],
            chat_template=tokenizer.get_chat_template(tools=arguments.get("tools")),
            **tokenizer.special_tokens_map | arguments,
        )
        # No tokenizer takes half of a surrogate pair, which a template may have as an escape.
        text.encode()
        return str(text)
    except Exception as error:  # whatever the template's code raises
        # With TemplateError itself, templates refuse orders of roles that they do not support.
        refuses = type(error) is jinja2.TemplateError or isinstance(error, ValueError)
        if refuses and not isinstance(error, UnicodeError):
            reason = f"The model's chat template refuses these messages: {error}"
        else:
            reason = f"The model's chat template fails on these messages: {type(error).__name__}: {error}"
        raise ApiError.invalid(field, reason) from error
