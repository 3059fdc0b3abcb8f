"""Tokenizers of families of models, and the reading of answers in their markup."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any

from tokenizers import AddedToken

from byte_tokenizer import byte_tokenizer
from frontend.families.family import Family
from frontend.families.markup import Markup
from frontend.families.reader import AnswerReader, Call, Reasoning
from frontend.requests.text import Detokenizer

__all__ = ["FAMILIES", "family_tokenizer", "markup_texts", "merged", "pieces_of"]

FAMILIES: dict[str, dict[str, Any]] = {
    file.name.removesuffix(".json"): json.loads(file.read_text(encoding="utf-8"))
    for file in files("frontend.families").iterdir()
    if file.name.endswith(".json")
}
_TOKENS = re.compile(
    r"<\|\w+\|>|<｜[^｜]+｜>|</?(?:think|(?:minimax:)?tool_call|function_calls|arg_\w+)>"
    r"|\[/?[A-Z_]+\](?!\()|</s>|\]~b\]|\[e~\["
)
# Those that are not special.
_PLAIN = re.compile(r"</?[a-z][a-z_:]+>|<｜tool.*")


def markup_texts(name: str) -> dict[str, bool]:
    """Return the texts of a family's markup that are tokens of its models, and whether each is special."""
    shown = json.dumps(FAMILIES[name], ensure_ascii=False).replace("\\\\", "")
    return {text: not _PLAIN.match(text) for text in _TOKENS.findall(shown)}


@cache
def family_tokenizer(name: str, *, as_tokens: bool = True) -> tuple[Any, Markup]:
    """Return a tokenizer of bytes and a family's markup, whose texts are tokens of their own or text.

    The first special token is the end token.
    """
    tokenizer = byte_tokenizer("<end>", eos_token="<end>")
    if as_tokens:
        texts = markup_texts(name)
        tokenizer.add_tokens([AddedToken(text, special=texts[text]) for text in texts])
    return tokenizer, Markup(Family.of(tokenizer, name), tokenizer)


def pieces_of(
    reader: AnswerReader, tokenizer: Any, markup: Markup, tokens: Iterable[int]
) -> list[Any]:
    """Return the pieces that a reader makes of an answer's tokens, one after the other."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=True, shown=markup.tokens)
    pieces: list[Any] = []
    for token in tokens:
        pieces += reader.push(detokenizer.push(token))
    return [*pieces, *reader.finish(detokenizer.flush())]


def merged(pieces: Iterable[Any]) -> dict[str, Any]:
    """Return the content, the reasoning and the calls (name, arguments) of an answer."""
    pieces = list(pieces)
    texts = [each for each in pieces if isinstance(each, str)]
    return {
        "content": "".join(each for each in texts if not isinstance(each, Reasoning)),
        "reasoning": "".join(each for each in texts if isinstance(each, Reasoning)),
        "calls": [(each.name, each.arguments) for each in pieces if isinstance(each, Call)],
    }
