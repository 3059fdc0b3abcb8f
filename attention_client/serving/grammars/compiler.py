"""Compiles grammars for the model's tokenizer in threads, so that neither streams nor the engine wait."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer

from attention_client.serving.api_error import ApiError
from attention_client.serving.grammars.check import __name__ as _CHECK
from attention_client.serving.grammars.guide import Grammar
from attention_client.serving.grammars.limits import parser_limits
from attention_client.serving.grammars.source import Part, Source

__all__ = ["GrammarCompiler", "Literal"]

Literal = Callable[[str], str]
"""Converts text of a prompt format, such as "<think>", to Lark: added tokens by number, the rest quoted."""

_TOO_COMPLEX = "it is too complex to compile"
_NO_TEXT = re.compile(r"""[\\"'()\s]""")  # between the pieces of a text in a grammar
_THREADS = 2
_KEPT = 64
# The check limits its processor time to less. This long it may wait for a processor.
_CHECK_S = 20.0


class GrammarCompiler:
    """Compiles the grammars of requests and keeps the recent ones.

    Args:
        tokenizer: A transformers tokenizer.
        vocabulary: Size of the model's vocabulary.
        end_tokens: The tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, end_tokens: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = max(vocabulary, len(tokenizer))
        self._end_tokens = tuple(end_tokens)
        self._threads = ThreadPoolExecutor(_THREADS, "grammars")
        self._lock = threading.Lock()  # guards the fields below
        self._tokens: LLTokenizer | None = None
        self._kept: OrderedDict[Source, LLMatcher] = OrderedDict()

    async def compile(
        self, field: str, build: Callable[[Literal], Source], *, bans: bool = False
    ) -> Grammar:
        """Compile a grammar in a thread.

        Args:
            field: The field of the request that asks for it.
            build: Returns the grammar. Called in the thread, since its text depends on the tokenizer.
            bans: Whether the request bans tokens, so that a text may need others than its usual ones.

        Raises:
            ApiError: The grammar is invalid or too complex, or the model's tokenizer does not fit (400).
        """
        loop = asyncio.get_running_loop()
        matcher = await loop.run_in_executor(self._threads, self._compile, field, build, bans)
        return Grammar(matcher, self._end_tokens, field)

    def prepare(self) -> None:
        """Read the tokenizer in a thread, when the endpoint starts.

        This holds the interpreter's lock for up to a second, which would delay running streams later. If the
        tokenizer takes no grammars, each request with one is refused.
        """
        self._threads.submit(self._ready, "")

    def close(self) -> None:
        """End the threads, when the endpoint stops. Waiting requests fail."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, field: str, build: Callable[[Literal], Source], bans: bool) -> LLMatcher:
        tokens = self._ready(field)
        source = build(self._literal)
        if bans or self._names_special(tokens, source):
            source = _spelled(source)
        with self._lock:
            found = self._kept.get(source)
            if found is not None:
                self._kept.move_to_end(source)
                return found
        grammar = self._checked(field, source)
        matcher = LLMatcher(tokens, grammar, log_level=0, limits=parser_limits())
        if matcher.is_error():
            raise _refusal(field, matcher.get_error())
        with self._lock:
            self._kept[source] = matcher
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return matcher

    def _ready(self, field: str) -> LLTokenizer:
        """Return the tokenizer in llguidance's form, made by the first call. Raises ApiError (400)."""
        if not self._end_tokens:
            raise ApiError.invalid(
                field, f"'{field}': this model has no end token, so no answer could end."
            )
        with self._lock:
            if self._tokens is None:
                try:
                    self._tokens = from_tokenizer(
                        self._tokenizer, n_vocab=self._vocabulary, eos_token=list(self._end_tokens)
                    )
                except Exception as error:
                    raise ApiError.invalid(
                        field,
                        f"'{field}': this model's tokenizer takes no grammars: {error}.",
                        "unsupported_parameter",
                    ) from error
            return self._tokens

    def _checked(self, field: str, source: Source) -> str:
        """Return the grammar as llguidance takes it, after a check in another process. Raises ApiError."""
        try:
            checked = subprocess.run(
                [sys.executable, "-m", _CHECK],
                input=f"{self._vocabulary}\n{source.dump()}".encode(),
                capture_output=True,
                timeout=_CHECK_S,
                check=True,
            )
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            raise _refusal(field, _TOO_COMPLEX) from error
        except OSError as error:
            raise ApiError(
                503, "Grammars cannot be compiled now. Try again later.", code="overloaded"
            ) from error
        if not checked.stdout:  # it ran out of memory
            raise _refusal(field, _TOO_COMPLEX)
        answer = json.loads(checked.stdout)
        if "error" in answer:
            raise _refusal(field, answer["error"])
        return str(answer["grammar"])

    def _names_special(self, tokens: LLTokenizer, source: Source) -> bool:
        """Whether a text of the grammar may hold a special token's name, also escaped or in two pieces."""
        texts = [_NO_TEXT.sub("", part.text) for part in source.parts]
        return any(
            _NO_TEXT.sub("", added.content) in text
            for token, added in self._tokenizer.added_tokens_decoder.items()
            if tokens.is_special_token(token)
            for text in texts
        )

    def _literal(self, text: str) -> str:
        special = {
            added.content: token
            for token, added in self._tokenizer.added_tokens_decoder.items()
            if added.content in text and not added.content.isspace()
        }
        parts: list[str] = []
        while text:
            # The first one in the text; of several at one place the longest.
            found = ((text.find(name), -len(name), name) for name in special if name in text)
            at, _, name = min(found, default=(len(text), 0, ""))
            if at:
                parts.append(json.dumps(text[:at], ensure_ascii=False))
            if name:
                parts.append(f"<[{special[name]}]>")
            text = text[at + len(name) :]
        return " ".join(parts)


def _spelled(source: Source) -> Source:
    """Return a grammar that allows each spelling of its texts.

    Else llguidance forces the tokens that the tokenizer makes of a text, where only this text can follow. Of
    a special token's name that is the special token, which is no text, and a request may ban the others.
    """
    start = f'%llguidance {{"no_forcing": true}}\nstart: @{source.parts[0].name}'
    return Source((Part("spelled", "lark", start), *source.parts))


def _refusal(field: str, reason: str) -> ApiError:
    return ApiError.invalid(
        field, f"'{field}': {reason.strip().removesuffix('<non-verbose/>').strip()}."
    )
