"""Checks one grammar in a process of its own: `python -m attention_client.serving.grammars.check`.

llguidance bounds most of its work, but some grammars overflow its stack or compile for a minute. Such a
grammar ends this process, not the endpoint. The process starts in 0.1 s, because it imports neither torch
nor transformers and takes bytes for tokens.

It reads one JSON object, {"vocabulary": SIZE, "parts": [PART, ...]}, and writes one: {"grammar": TEXT} for
`LLMatcher`, or {"error": REASON}.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from attention_client.serving.grammars.schema import Repair
from attention_client.serving.grammars.source import Part

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

__all__ = ["main", "matcher_of"]

_CPU_S = 3
_MOST_MEMORY = 2 * 2**30  # bytes of address space
_STACK = 2**20  # bytes
_MOST_STATES = 50_000  # 1 to 2 kB each
_MOST_SYMBOLS = 100_000
_END = 256
# One space, or one line break and an indentation. A weak model fills whatever more it may write.
_WHITE_SPACE: JsonCompileOptions = {"whitespace_pattern": r"( |\n {0,20}|\n\t{0,10})"}


class _Bytes:
    """The tokens of llguidance's interface: 256 bytes, an end, and empty ones up to the vocabulary."""

    eos_token_id = _END
    bos_token_id = None
    special_token_ids = (_END,)

    def __init__(self, vocabulary: int) -> None:
        others = max(0, vocabulary - _END - 1)
        self.tokens = [*(bytes([byte]) for byte in range(256)), b"</s>", *[b""] * others]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def matcher_of(tokens: LLTokenizer, grammar: str) -> LLMatcher:
    """Compile a grammar; one step of it takes at most some 15 ms. Raises ValueError with the reason."""
    limits = LLParserLimits(
        max_lexer_states=_MOST_STATES, max_grammar_size=_MOST_SYMBOLS, verbose_errors=False
    )
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


def main() -> None:
    """Check the grammar on the standard input."""
    for what, most in ((resource.RLIMIT_CPU, _CPU_S), (resource.RLIMIT_AS, _MOST_MEMORY)):
        _, hard = resource.getrlimit(what)
        allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (allowed, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The endpoint's threads have more stack, so a grammar that passes here does not overflow theirs.
    threading.stack_size(_STACK)
    thread = threading.Thread(target=_check)
    thread.start()
    thread.join()


def _check() -> None:
    asked = json.load(sys.stdin.buffer)
    tokens = LLTokenizer(TokenizerWrapper(_Bytes(asked["vocabulary"])))
    try:
        answer = {"grammar": _compiled(tokens, [Part(**part) for part in asked["parts"]])}
    except (ValueError, RecursionError) as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))


def _compiled(tokens: LLTokenizer, parts: list[Part]) -> str:
    """Return the grammar for `LLMatcher`. Raises ValueError."""
    grammar = json.dumps({"grammars": [_converted(part) for part in parts]})
    try:
        matcher = matcher_of(tokens, grammar)
    except ValueError:
        repaired = [_repaired(tokens, part) for part in parts]
        if repaired == parts:
            raise
        return _compiled(tokens, repaired)
    matcher.compute_bitmask()
    # Stopped before an answer: there is none that follows the grammar.
    if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
        raise ValueError(matcher.get_error() or "no answer can follow it")
    return grammar


def _repaired(tokens: LLTokenizer, part: Part) -> Part:
    """Return a part whose JSON schema compiles. Raises ValueError with the path of what does not."""

    def error(schema: dict[str, Any]) -> str:
        try:
            matcher_of(tokens, LLMatcher.grammar_from_json_schema(schema, _WHITE_SPACE))
        except ValueError as error:
            return str(error)
        return ""

    schema = json.loads(part.text) if part.kind == "json" else None
    if not isinstance(schema, dict) or not error(schema):
        return part
    return replace(part, text=json.dumps(Repair(schema, error).run(), ensure_ascii=False))


def _converted(part: Part) -> dict[str, Any]:
    """Convert a part to llguidance's form. Raises ValueError."""
    if part.kind == "json":
        schema = json.loads(part.text)
        if isinstance(schema, dict):
            # llguidance's own options: one of them ignores the keywords that it cannot compile.
            schema.pop("x-guidance", None)
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), _WHITE_SPACE)
    elif part.kind == "regex":
        grammar = LLMatcher.grammar_from_regex(part.text)
    else:
        try:
            text = any_to_lark(part.text) if part.kind == "grammar" else part.text
        except Exception as error:
            raise ValueError(f"neither Lark nor GBNF: {error}") from error
        return {"name": part.name, "lark_grammar": text}
    (converted,) = json.loads(grammar)["grammars"]
    return dict(converted) | {"name": part.name}


if __name__ == "__main__":
    main()
