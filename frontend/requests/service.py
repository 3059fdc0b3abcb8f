"""The served model: the state that all handlers of HTTP requests share."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from typing import Any

from eaas.generation.errors import ApiError, EngineStoppedError
from eaas.generation.work import Engine
from frontend.defaults import Defaults, ModelFiles, context_length
from frontend.families.family import Family
from frontend.families.markup import Markup
from frontend.grammars.compiler import GrammarCompiler
from frontend.limits import ServeLimits
from frontend.metrics import ServeMetrics
from frontend.prompts.body import MOST_PROMPTS, RequestT
from frontend.prompts.pool import PromptPool
from frontend.prompts.reader import ModelLimits
from frontend.requests.logprobs import NumberedTexts, TokenTexts

__all__ = ["More", "Service"]

_LOG = logging.getLogger(__name__)
_STOP_TIMEOUT_S = 5.0
# Of a sequence, where neither the model nor the cache has a limit.
_LONGEST = 1 << 20
_LOG_INTERVAL_S = 10.0

More = Callable[[int], None]
"""Counts a request's sequences beyond the first against the endpoint's limit (`Quota`)."""


class Service:
    """A model, its engine and its prompt readers, for all request handlers.

    Raises:
        CheckpointError: generation_config.json has a value that no request may have.
    """

    def __init__(
        self,
        files: ModelFiles,
        names: Sequence[str],
        unlisted: Sequence[str],
        engine: Engine,
        limits: ServeLimits,
        metrics: ServeMetrics,
        family: Family | None = None,
    ) -> None:
        self.tokenizer = tokenizer = files.tokenizer
        self.token_texts = TokenTexts(tokenizer)
        self.numbered_texts = NumberedTexts(tokenizer)
        self.name = names[0]
        self.engine = engine
        self.metrics = metrics
        self.names = tuple(dict.fromkeys(names))
        self._known = {*names, *unlisted}
        self._created = int(time.time())
        self._logged_at = -math.inf  # when ignored fields were named last
        text_config = files.config.get_text_config()
        self._context_length = context_length(text_config)
        self._vocabulary = int(text_config.vocab_size)
        self.max_sequences = min(MOST_PROMPTS, limits.max_requests)
        self.defaults = defaults = Defaults.of(files)
        self.markup = cache(partial(Markup, family, tokenizer))
        if family is None:
            _LOG.info(
                "no known family of models fits this tokenizer and chat template: answers are text, without "
                "reasoning or tool calls of their own (frontend.response_template names one)"
            )
        else:
            _LOG.info("answers are read as those of the family %s", family.name)
        self.grammars = GrammarCompiler(tokenizer, self._vocabulary, defaults.end_tokens)
        if defaults.ignored:
            _LOG.warning(
                "generation_config.json: %s: not supported, so answers do not follow them",
                ", ".join(defaults.ignored),
            )

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request, prompt plus answer."""
        bounds = (self._context_length, self.engine.capacity)
        return min((int(bound) for bound in bounds if bound is not None), default=_LONGEST)

    @cached_property
    def prompts(self) -> PromptPool:
        """What reads the bodies of requests; made once an engine is connected, whose capacity is a limit."""
        return PromptPool(self.tokenizer, ModelLimits(self.max_model_len, self._vocabulary))

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
