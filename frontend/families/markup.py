"""A family's markup as a tokenizer writes it: some of it as tokens, the rest as text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from transformers.utils.chat_parsing.response_templates import (
    ResponseTemplateField,
    load_response_template,
)

from frontend.families.family import Family

__all__ = ["NO_MARKUP", "Markup"]

_FIRST_MARK = 0xD800  # lone surrogates, of which no decoded text has any
_MARKS = re.compile("[\ud800-\udfff]")
_REASONING = ("reasoning_content", "reasoning", "thinking")


class Markup:
    """The markup of a family for one tokenizer.

    A token that the markup names is a character of its own, its mark, in the text that `AnswerReader` reads.
    So the same letters in an answer are text. The token's own text follows, unless it is special and left
    out.

    Args:
        family: The family; None: answers are text.
        tokenizer: A transformers tokenizer.
        skips_special: Whether answers have no text of special tokens.
        letters: Whether the letters of a token are markup, too: a grammar of letters wrote the answer.

    Attributes:
        tokens: Mark and shown text of each such token.
        reasoning, calls, content: The regions of the family's template; None: it has no such region.
        joint: What the model writes between calls, before other parts or after its last call; None: nothing.
        joint_is_token: Whether this is tokens, which cannot be text.
        closing: Text that ends reasoning, for grammars; None: there is no such text.
    """

    def __init__(
        self,
        family: Family | None,
        tokenizer: Any,
        *,
        skips_special: bool = True,
        letters: bool = False,
    ) -> None:
        fields = {"content": {}} if family is None else family.template["fields"]
        call = None if family is None else family.call
        joints = [] if call is None else [call.separator, call.end]
        joints = [text for text in joints if len(text.strip()) > 2]
        fields = fields | ({"joint": {"open": joints}} if joints else {})
        named = next((name for name in _REASONING if name in fields), _REASONING[0])
        written = "\n".join(_strings(fields))
        written += re.sub(r"\\(\W)", r"\1", written)
        self.tokens: dict[int, str] = {}
        self._hidden: dict[str, str] = {}
        shown: dict[str, str] = {}
        for token, added in tokenizer.added_tokens_decoder.items() if written else ():
            text, mark = added.content, chr(_FIRST_MARK + len(self.tokens))
            if text not in written or text.isspace():
                continue
            if added.special and skips_special:
                self._hidden[mark] = text
            shown[text] = self.tokens[token] = mark if mark in self._hidden else mark + text
        marked = {name: _marked(field, shown, letters) for name, field in fields.items()}
        self.family = family
        regions = _regions(marked)
        self.reasoning: ResponseTemplateField | None = regions.get(named)
        self.calls: ResponseTemplateField | None = regions.get("tool_calls")
        self.content: ResponseTemplateField | None = regions.get("content")
        self.joint: ResponseTemplateField | None = regions.get("joint")
        self.joint_is_token = bool(joints) and any(map(_MARKS.search, marked["joint"]["open"]))
        self._plain = _regions(fields).get(named)
        closing = fields.get(named, {}).get("close")
        self.closing = closing[0] if isinstance(closing, list) else closing

    def thought(self, opening: str, *, begins: bool = False) -> bool | None:
        """Whether the end of a prompt opens reasoning (True) or closes it (False); None: neither.

        Args:
            opening: The end of the prompt, which begins the answer.
            begins: Whether it is text of the answer, in which reasoning is at the beginning.
        """
        field = self._plain
        if field is None or field.open_re is None or field.close_re is None:
            return None
        if begins and not field.open_re.match(opening.lstrip()):
            return None
        opened = max((found.end() for found in field.open_re.finditer(opening)), default=-1)
        closed = max((found.end() for found in field.close_re.finditer(opening)), default=-1)
        return None if opened == closed else opened > closed

    @staticmethod
    def without_cut(text: str, regions: Iterable[ResponseTemplateField]) -> str:
        """Return the end of an answer without the beginning of a region's delimiter, which was cut off.

        A delimiter that begins with text may be text.
        """
        for field in regions:
            found = field.open_re.search(text, partial=True)
            if found is not None and found.partial and _MARKS.match(found.group().lstrip()):
                text = text[: found.start()]
        return text

    def shown(self, text: str) -> str:
        """Return a part of an answer without marks, as its reader shows it."""
        return _MARKS.sub("", text)

    def whole(self, text: str) -> str:
        """Return a part of an answer with the text of all its tokens."""
        return _MARKS.sub(lambda found: self._hidden.get(found[0], ""), text)


def _regions(fields: dict[str, Any]) -> dict[str, ResponseTemplateField]:
    # The anchor is for transformers' own parser.
    spec = {"start_anchor": "\n", "fields": fields}
    return dict(load_response_template(spec).fields)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)


def _marked(field: dict[str, Any], shown: dict[str, str], letters: bool) -> dict[str, Any]:
    """Return a field whose delimiters have the marks of tokens, or also their letters."""
    marked = dict(field)
    for key in ("open", "close"):
        if key in field:
            texts = field[key] if isinstance(field[key], list) else [field[key]]
            marked[key] = [_replaced(text, shown) for text in texts] + (texts if letters else [])
        if f"{key}_pattern" in field:
            # A pattern may write the token with escapes or without.
            plain = {
                text: f"(?:{re.escape(mark)}{f'|{re.escape(text)}' if letters else ''})"
                for text, mark in shown.items()
            }
            escaped = {re.escape(text): pattern for text, pattern in plain.items()}
            pattern = _replaced(field[f"{key}_pattern"], plain | escaped)
            # "Any other character" is no token of markup.
            marked[f"{key}_pattern"] = re.sub(r"(?<!\\)\[\^", "[^\ud800-\udfff", pattern)
    return marked


def _replaced(text: str, by: dict[str, str]) -> str:
    if not by:
        return text
    longest_first = sorted(by, key=len, reverse=True)
    return re.sub("|".join(map(re.escape, longest_first)), lambda found: by[found[0]], text)


NO_MARKUP = Markup(None, None)
"""Of answers that are text."""
