"""Compiles grammars for the model's tokenizer in threads, so that neither streams nor the engine wait."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from eaas.generation.errors import ApiError
from eaas.generation.grammar import Grammar
from eaas.generation.matchers import Matchers
from frontend.grammars import Part, Source
from frontend.grammars.check import __name__ as _CHECK

__all__ = ["GrammarCompiler", "Literal"]

Literal = Callable[[str], str]
"""Converts text of a prompt format, such as "<think>", to Lark: added tokens by number, the rest quoted."""

_TOO_COMPLEX = "it is too complex to compile"
_THREADS = 2
_KEPT = 64
# The check limits its processor time to less. This long it may wait for a processor.
_CHECK_S = 20.0


class GrammarCompiler:
    """Compiles the grammars of requests and keeps the recent ones.

    It reads the tokenizer in a thread when it is made, since that holds the interpreter's lock for up to a
    second. If the tokenizer takes no grammars, each request with one is refused.

    Args:
        tokenizer: A transformers tokenizer.
        vocabulary: Size of the model's vocabulary.
        end_tokens: The tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, end_tokens: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._end_tokens = tuple(end_tokens)
        self._threads = ThreadPoolExecutor(_THREADS, "grammars")
        self._matchers = Matchers(tokenizer, vocabulary, end_tokens, self._threads)
        self._checked = lru_cache(_KEPT)(self._check)

    async def compile(self, field: str, build: Callable[[Literal], Source]) -> Grammar:
        """Compile a grammar in a thread.

        Args:
            field: The field of the request that asks for it.
            build: Returns the grammar. Called in the thread, since its text depends on the tokenizer.

        Raises:
            ApiError: The grammar is invalid or too complex, or the model's tokenizer does not fit (400).
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._compile, field, build)

    def close(self) -> None:
        """End the threads, when the endpoint stops. Waiting requests fail."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, field: str, build: Callable[[Literal], Source]) -> Grammar:
        if not self._end_tokens:
            raise _refusal(field, "this model has no end token, so no answer could end")
        if refusal := self._matchers.refusal():
            reason = f"this model's tokenizer takes no grammars: {refusal}"
            raise _refusal(field, reason, "unsupported_parameter")
        try:
            text = self._checked(build(self._literal))
            return Grammar(text, self._matchers.of(text), self._end_tokens, field)
        except ValueError as error:
            raise _refusal(field, str(error)) from error

    def _check(self, source: Source) -> str:
        """Let another process check a grammar; return its text. Raises ValueError, ApiError (503)."""
        # Else llguidance forces the tokens that the tokenizer makes of a text, where only this text can
        # follow. Of a special token's name that is the special token, which is no text, and a request may
        # ban the others.
        start = f'%llguidance {{"no_forcing": true}}\nstart: @{source[0].name}'
        parts = [asdict(part) for part in (Part("spelled", "lark", start), *source)]
        try:
            checked = subprocess.run(
                [sys.executable, "-m", _CHECK],
                input=json.dumps(
                    {"vocabulary": self._matchers.vocabulary, "parts": parts}
                ).encode(),
                capture_output=True,
                timeout=_CHECK_S,
                check=True,
            ).stdout
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            raise ValueError(_TOO_COMPLEX) from error
        except OSError as error:
            raise ApiError(
                503, "Grammars cannot be compiled now. Try again later.", code="overloaded"
            ) from error
        # It says nothing if it ran out of memory.
        answer = json.loads(checked or json.dumps({"error": _TOO_COMPLEX}))
        if "error" in answer:
            raise ValueError(answer["error"])
        return str(answer["grammar"])

    def _literal(self, text: str) -> str:
        added = self._tokenizer.added_tokens_decoder.items()
        numbers = {each.content: token for token, each in added if not each.content.isspace()}
        # The first one in the text; of several at one place the longest.
        names = "|".join(map(re.escape, sorted(numbers, key=len, reverse=True)))
        pieces = re.split(f"({names})", text) if names else [text]
        return " ".join(
            f"<[{numbers[piece]}]>" if piece in numbers else json.dumps(piece, ensure_ascii=False)
            for piece in pieces
            if piece
        )


def _refusal(field: str, reason: str, code: str = "invalid_value") -> ApiError:
    reason = reason.strip().removesuffix("<non-verbose/>").strip()
    return ApiError.invalid(field, f"'{field}': {reason}.", code)
