"""Whether an answer's parts and the markup between them are its text: a search that is told the parts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import regex
from transformers.utils.chat_parsing.content_parsers import process_field

from frontend.families.markup import Markup
from frontend.families.reader import Call, Reasoning

__all__ = ["Alignment", "joined"]

_MARK = regex.compile("[\ud800-\udfff]")


def joined(pieces: Iterable[Any]) -> list[Any]:
    """Return the pieces of an answer, texts of one kind joined and calls as (name, arguments)."""
    found: list[Any] = []
    for kind, run in groupby(pieces, type):
        if issubclass(kind, Call):
            found += [(call.name, call.arguments) for call in run]
        elif issubclass(kind, str):
            found.append(kind("".join(run)))
    return found


@dataclass(frozen=True)
class _At:
    """A place in the text, and what was read before it.

    Attributes:
        position: In the text.
        part: begin, reasoning or content.
        piece, offset: The piece that follows, or what is left of it.
        drops: Whether white space here belongs to the markup before it.
        called: Whether a call was read.
    """

    position: int
    part: str
    piece: int = 0
    offset: int = 0
    drops: bool = False
    called: bool = False


@dataclass(frozen=True)
class Alignment:
    """An answer and how it was read.

    Attributes:
        markup: The markup of the answer.
        text: The text of all its tokens, with their marks.
        pieces: Its pieces (`joined`).
        begin: "begin": it may begin with reasoning; "reasoning": the prompt opened it; "content": it may not.
        calls: Whether it may call functions.
        one_call: Whether it ends after its first call.
        complete: Calls that are certain where they begin in the content.
    """

    markup: Any
    text: str
    pieces: list[Any]
    begin: str
    calls: bool
    one_call: bool
    complete: tuple[str, ...]

    def holds(self) -> bool:
        """Whether the text is the pieces, each in its place, and markup."""
        todo = [_At(0, self.begin, drops=self.begin == "reasoning")]
        seen = set(todo)
        while todo:
            at = todo.pop()
            if self._ends(at):
                return True
            new = {*self._steps(at)} - seen
            seen |= new
            todo += new
        return False

    @cached_property
    def _fields(self) -> list[Any]:
        markup: Markup = self.markup
        fields = (markup.reasoning, markup.calls, markup.content, markup.joint)
        return [field for field in fields if field is not None and field.open_re is not None]

    def _ends(self, at: _At) -> bool:
        if at.piece < len(self.pieces):
            return False
        if at.position == len(self.text) or (self.one_call and at.called):
            return True
        rest = self.text[at.position :]
        if at.part == "reasoning":
            rest = rest.lstrip()  # white space at the end of reasoning is markup
            if not _MARK.sub("", rest).strip():
                return True
        # Markup that begins with a token and is cut off.
        return bool(_MARK.match(rest.lstrip())) and any(
            (found := field.open_re.fullmatch(rest, partial=True)) and found.partial
            for field in self._fields
        )

    def _steps(self, at: _At) -> Iterator[_At]:
        reasoning, text = self.markup.reasoning, self.text
        if at.part == "begin":
            opened = reasoning.open_re.match(text, len(text) - len(text.lstrip()))
            if opened:
                yield _At(opened.end(), "reasoning", drops=True)
            else:
                yield replace(at, part="content")
            return
        if at.part == "reasoning":
            space = regex.compile(r"\s*").match(text, at.position).end()
            closed = reasoning.close_re.match(text, space)
            if closed:
                yield replace(at, position=closed.end(), part="content", drops=True)
            if not closed or space > at.position:
                yield from self._characters(at, Reasoning)
            # A call ends reasoning that nothing closes.
            calls = self.markup.calls if self.calls else None
            is_closed = reasoning.close_re.search(text, at.position)
            if calls and not is_closed and calls.open_re.match(text, space):
                yield replace(at, part="content", drops=True)
            return
        yield from self._after_markup(at)
        allowed = self.calls and not (self.one_call and at.called)
        if allowed:
            yield from self._call(at)
        if not (allowed and text.startswith(self.complete, at.position)):
            yield from self._characters(at, str)

    def _characters(self, at: _At, kind: type[str]) -> Iterator[_At]:
        """Yield the place after a character that is text of a kind, or no text."""
        character = self.text[at.position : at.position + 1]
        after = replace(at, position=at.position + 1)
        if _MARK.match(character) or (at.drops and character.isspace()):
            yield after
        piece = self.pieces[at.piece] if at.piece < len(self.pieces) else None
        if character and type(piece) is kind and piece[at.offset] == character:
            yield self._past_character(replace(after, drops=False))

    def _past_character(self, at: _At) -> _At:
        if at.offset + 1 < len(self.pieces[at.piece]):
            return replace(at, offset=at.offset + 1)
        return replace(at, piece=at.piece + 1, offset=0)

    def _after_markup(self, at: _At) -> Iterator[_At]:
        """Yield the places after markup between parts of an answer."""
        markup: Markup = self.markup
        if markup.joint and (at.called or markup.joint_is_token):
            yield from self._past(at, markup.joint, at.part, at.drops)
        if markup.content and markup.content.open_re:
            yield from self._past(at, markup.content, at.part, at.drops)
        if markup.reasoning and markup.reasoning.repeats:
            yield from self._past(at, markup.reasoning, "reasoning", True)

    def _past(self, at: _At, field: Any, part: str, drops: bool) -> Iterator[_At]:
        found = field.open_re.match(self.text, at.position)
        if not found:
            return
        after = replace(at, position=found.end(), part=part, drops=drops)
        yield after
        if field.join and at.piece < len(self.pieces):
            piece = self.pieces[at.piece]
            kind = Reasoning if part == "reasoning" else str
            if type(piece) is kind and piece[at.offset] == field.join:
                yield self._past_character(after)

    def _call(self, at: _At) -> Iterator[_At]:
        """Yield the places after the calls of a region."""
        field, text = self.markup.calls, self.text
        opened = field.open_re.match(text, at.position)
        if not opened or at.offset:
            return
        whole = self.markup.whole
        captures = {
            name: whole(value).strip() for name, value in opened.groupdict().items() if value
        }
        closer = field.close_re or field.open_re
        closes = [
            (found.start(), found.end() if field.close_re else found.start())
            for found in closer.finditer(text, opened.end())
        ]
        if field.content == "json" or field.close_re is None:
            cut = closer.search(
                text, max([opened.end(), *(end for _, end in closes)]), partial=True
            )
            closes += [(len(text), len(text))]
            closes += [(cut.start(), len(text))] if cut and cut.partial else []
        for end, after in closes:
            try:
                value = process_field(whole(text[opened.end() : end]), field, captures)
                regions = value if isinstance(value, list) else [value]
                calls = [
                    (each["function"]["name"], each["function"]["arguments"]) for each in regions
                ]
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
            calls = calls[:1] if self.one_call else calls
            given = [
                (each[0], json.loads(each[1])) if isinstance(each, tuple) else each
                for each in self.pieces[at.piece : at.piece + len(calls)]
            ]
            if calls and given == calls:
                yield _At(after, "content", at.piece + len(calls), drops=True, called=True)
