"""The attention client's served model: the state that all handlers of HTTP requests share."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from attention_client.serving.defaults import Defaults, context_length
from attention_client.serving.families.family import Family
from attention_client.serving.families.markup import Markup
from attention_client.serving.grammars.compiler import GrammarCompiler
from attention_client.serving.limits import ServeLimits
from attention_client.serving.metrics import ServeMetrics
from attention_client.serving.prompts.body import MOST_PROMPTS, RequestT
from attention_client.serving.prompts.pool import PromptPool
from attention_client.serving.prompts.reader import ModelLimits
from attention_client.serving.requests.logprobs import NumberedTexts, TokenTexts
from eaas.generation.errors import ApiError, EngineStoppedError
from eaas.generation.work import Engine

__all__ = ["More", "Service"]

_LOG = logging.getLogger(__name__)
_STOP_TIMEOUT_S = 5.0
# Of a sequence, where neither the model nor the cache has a limit.
_LONGEST = 1 << 20
_LOG_INTERVAL_S = 10.0

More = Callable[[int], None]
"""Counts a request's sequences beyond the first against the endpoint's limit (`Quota`)."""


class Service:
    """A loaded model, its engine and its prompt readers, for all request handlers."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        names: Sequence[str],
        unlisted: Sequence[str],
        engine: Engine,
        limits: ServeLimits,
        metrics: ServeMetrics,
        defaults: Defaults,
        family: Family | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.token_texts = TokenTexts(tokenizer)
        self.numbered_texts = NumberedTexts(tokenizer)
        self.name = names[0]
        self.engine = engine
        self.metrics = metrics
        self.names = tuple(dict.fromkeys(names))
        self._known = {*names, *unlisted}
        self._created = int(time.time())
        self._logged_at = -math.inf  # when ignored fields were named last
        text_config = model.config.get_text_config()
        bounds = (context_length(text_config), engine.capacity)
        self.max_sequences = min(MOST_PROMPTS, limits.max_requests)
        self.max_model_len = min(
            (int(bound) for bound in bounds if bound is not None), default=_LONGEST
        )
        self.prompts = PromptPool(
            tokenizer, ModelLimits(self.max_model_len, int(text_config.vocab_size))
        )
        self.markup = cache(partial(Markup, family, tokenizer))
        if family is None:
            _LOG.info(
                "no known family of models fits this tokenizer and chat template: answers are text, without "
                "reasoning or tool calls of their own (attention_client.response_template names one)"
            )
        else:
            _LOG.info("answers are read as those of the family %s", family.name)
        self.defaults = defaults
        self.grammars = GrammarCompiler(tokenizer, int(text_config.vocab_size), defaults.end_tokens)
        if defaults.ignored:
            _LOG.warning(
                "generation_config.json: %s: not supported, so answers do not follow them",
                ", ".join(defaults.ignored),
            )

    async def read(self, cls: type[RequestT], body: bytes) -> tuple[RequestT, list[list[int]]]:
        """Read a request's body (`PromptPool.read`). Raises ApiError (400, 404, 503)."""
        request, prompts = await self.prompts.read(cls, body)
        self.check_name(request.model)
        now = time.monotonic()
        if request.ignored and now - self._logged_at >= _LOG_INTERVAL_S:
            self._logged_at = now
            named = request.ignored_header.values()
            _LOG.warning("unknown fields of a request were ignored: %s", *named)
        return request, prompts

    def check_engine(self) -> None:
        """Raise EngineStoppedError (status 503) if the engine has stopped. Called before a body is parsed."""
        failure = self.engine.failure()
        if failure is not None:
            raise EngineStoppedError(f"The engine has stopped: {failure}. Restart the server.")

    def check_name(self, model: str | None) -> None:
        """Raise ApiError (404) if a request names another model. None passes."""
        if model is not None and model not in self._known:
            raise ApiError(
                404,
                f"The model '{model}' does not exist. This server serves '{self.name}'.",
                type="invalid_request_error",
                param="model",
                code="model_not_found",
            )

    def card(self, name: str) -> dict[str, Any]:
        """Return the model's entry in /v1/models under one of its names."""
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "eaas",
            "root": self.name,
            "max_model_len": self.max_model_len,
        }

    def shutdown(self) -> None:
        """Stop the engine, which fails all requests, and the prompt readers.

        Called at the end of the grace period and again at the end of the application.
        """
        self.engine.stop(_STOP_TIMEOUT_S)
        self.prompts.close()
        self.grammars.close()
