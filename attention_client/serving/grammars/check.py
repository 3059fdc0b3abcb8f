"""Checks one grammar in a process of its own: `python -m attention_client.serving.grammars.check`.

llguidance bounds most of its work, but some grammars overflow its stack or compile for a minute. Such a
grammar ends this process, not the endpoint. The process starts in 0.1 s, because it imports neither torch
nor transformers and takes bytes for tokens.

It reads the size of the vocabulary (a line) and the grammar (`Source.dump`), and writes one JSON object:
{"grammar": TEXT} for `LLMatcher`, or {"error": REASON}.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from attention_client.serving.grammars.limits import parser_limits
from attention_client.serving.grammars.schema import Repair
from attention_client.serving.grammars.source import Part, Source

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

__all__ = ["main"]

_CPU_S = 3
_MOST_MEMORY = 2 * 2**30  # bytes of address space
_STACK = 2**20  # bytes
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
    vocabulary = int(sys.stdin.buffer.readline())
    print(json.dumps(_answer(vocabulary, Source.load(sys.stdin.buffer.read().decode()))))


def _answer(vocabulary: int, source: Source) -> dict[str, str]:
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes(vocabulary)))

    def error(schema: dict[str, Any]) -> str:
        grammar = LLMatcher.grammar_from_json_schema(schema, _WHITE_SPACE)
        return LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits()).get_error()

    try:
        grammar, reason = _compiled(tokenizer, [_converted(part) for part in source.parts])
        if reason:
            parts = [_repaired(part, error) for part in source.parts]
            if parts != list(source.parts):
                grammar, reason = _compiled(tokenizer, [_converted(part) for part in parts])
    except (ValueError, RecursionError) as problem:
        reason = str(problem)
    return {"error": reason} if reason else {"grammar": grammar}


def _compiled(tokenizer: LLTokenizer, parts: list[dict[str, Any]]) -> tuple[str, str]:
    """Return the grammar for `LLMatcher`, and why it cannot be compiled; empty: it can."""
    grammar = json.dumps({"grammars": parts})
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    # Without an error but stopped: there is no answer that follows the grammar.
    if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
        return grammar, matcher.get_error() or "no answer can follow it"
    return grammar, ""


def _repaired(part: Part, error: Callable[[dict[str, Any]], str]) -> Part:
    """Return a part whose JSON schema compiles. Raises ValueError with the path of what does not."""
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
