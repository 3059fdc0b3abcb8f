"""Splits the text of an answer, as it arrives, into reasoning, calls and text.

```
                    opened by the prompt
BEGIN --open--> REASONING --close--> CONTENT --open--> CALL
  |                                  ^     ^             |
  +-------- anything else -----------+     +--- close ---+
```
"""

from __future__ import annotations

import enum
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as data_field
from typing import Any

from transformers.utils.chat_parsing.content_parsers import process_field
from transformers.utils.chat_parsing.response_templates import ResponseTemplateField

from frontend.families.family import CallFormat
from frontend.families.markup import Markup

__all__ = ["AnswerReader", "Call", "Calls", "Reasoning"]


def _new_id() -> str:
    # Nine letters and digits: the templates of Mistral's models take no others.
    return secrets.token_hex(5)[:9]


class Reasoning(str):
    """Text of the model's reasoning. A piece that is a plain string is text of the answer."""

    __slots__ = ()


@dataclass(frozen=True)
class Call:
    """A tool call in the model's answer.

    Attributes:
        index: Its position among the answer's calls.
        name: The function.
        arguments: A JSON object as a string.
        id: Names the call in the message with its result.
    """

    index: int
    name: str
    arguments: str
    id: str = data_field(default_factory=_new_id, compare=False)


Piece = str | Call


class Calls(enum.Enum):
    """Where an answer may call functions."""

    NEVER = enum.auto()
    ANYWHERE = enum.auto()
    INSTEAD = enum.auto()  # from its first character, or nowhere


class _State(enum.Enum):
    BEGIN = enum.auto()
    REASONING = enum.auto()
    CONTENT = enum.auto()
    CALL = enum.auto()


class AnswerReader:
    """Reads one answer.

    Reasoning is read at the beginning only, unless the family's reasoning repeats. What cannot be read as a
    call is text. White space around reasoning and calls belongs to the markup.

    Args:
        markup: The markup of the model's answers.
        opening: The end of the prompt, which begins the answer.
        calls: Where the answer may call functions.
        one_call: Whether the answer ends after its first call.
        is_content: Whether a grammar makes the answer text, in which nothing is markup.
        forced: The format of an answer that a grammar makes calls; None: it need not be calls.
        tools: Functions that may be called, by name: the JSON schemas of their arguments.
        earlier: Number of calls in earlier messages, for their ids.
        continues: Whether the opening is text of the answer, which goes on.

    Attributes:
        ended: Whether the answer ends here.
        reasoning_tokens: Pushes whose text was reasoning.
    """

    def __init__(
        self,
        markup: Markup,
        *,
        opening: str = "",
        calls: Calls = Calls.NEVER,
        one_call: bool = False,
        is_content: bool = False,
        forced: CallFormat | None = None,
        tools: Mapping[str, Any] | None = None,
        earlier: int = 0,
        continues: bool = False,
    ) -> None:
        self._markup = markup
        self._reasoning: Any = markup.reasoning
        self._calls = Calls.NEVER if markup.calls is None else calls
        self._one_call, self._is_content, self._forced = one_call, is_content, forced
        self._tools = tools or {}
        self._earlier = earlier
        self._count = 0
        self._buffer = ""
        self._drops_space = False
        self._opener: Any = None  # the match that opened a call
        self._first_close = self._from = 0  # in the buffer of an open call
        self._shown: set[str] = set()  # regions whose text was shown
        self._held = 0  # pushes in reasoning whose text may be its end
        self.reasoning_tokens = 0
        self.ended = False
        thought = markup.thought(opening, begins=continues)
        is_text = is_content or continues or forced is not None or markup.reasoning is None
        self._state = _State.CONTENT if is_text or thought is False else _State.BEGIN
        if thought:
            self._enter(_State.REASONING)

    def push(self, text: str) -> Iterator[Piece]:
        """Add the text of the next token, with its mark; yield the pieces that are certain."""
        reasons = self._state is _State.REASONING
        self._buffer += text
        yield from self._advance(final=False)
        if reasons and self._state is _State.REASONING:
            self._held += 1
            if not self._buffer:
                self._count_held()
        else:
            self._held = 0

    def finish(self, text: str = "", end: str = "", *, shown: bool = False) -> Iterator[Piece]:
        """Add what was held back at the last token; yield the pieces that are left.

        Args:
            text: The text that was held back.
            end: The end token's text with its mark, which may close a call or reasoning.
            shown: Whether the answer has the end token's text in any case.
        """
        if self._closes(text + end) or (shown and self._state is _State.REASONING):
            text, end = text + end, ""
        self._buffer += text
        self._count_held()
        begins = [self._reasoning] if self._state is _State.BEGIN else self._regions()
        self._buffer = self._markup.without_cut(self._buffer, begins)
        yield from self._advance(final=True)
        if shown and (left := self._markup.shown(end)):
            yield left

    def _closes(self, text: str) -> bool:
        """Whether text closes the call or the reasoning that the answer is inside."""
        regions = {_State.CALL: self._markup.calls, _State.REASONING: self._reasoning}
        field = regions.get(self._state)
        if field is None or field.close_re is None:
            return field is not None
        whole = self._buffer + text
        return any(found.end() == len(whole) for found in field.close_re.finditer(whole))

    def _count_held(self) -> None:
        self.reasoning_tokens += self._held
        self._held = 0

    def _advance(self, *, final: bool) -> Iterator[Piece]:
        steps = {
            _State.BEGIN: self._begin,
            _State.REASONING: self._reason,
            _State.CONTENT: self._answer if self._forced is None else self._collect,
            _State.CALL: self._call,
        }
        while (self._buffer or (final and self._state is _State.CALL)) and not self.ended:
            before = self._state, len(self._buffer)
            yield from steps[self._state](final)
            if (self._state, len(self._buffer)) == before:
                return

    def _begin(self, final: bool) -> Iterator[Piece]:
        field = self._reasoning
        space = len(self._buffer) - len(self._buffer.lstrip())
        found = field.open_re.match(self._buffer, space, partial=not final)
        if found is None:
            self._state = _State.CONTENT
        elif final or not _may_grow(found, field, "open"):
            self._take(found.end())
            self._enter(_State.REASONING)
        yield from ()

    def _reason(self, final: bool) -> Iterator[Piece]:
        found, hold = self._find([self._reasoning], "close", final)
        call = None
        if found is None and self._calls is Calls.ANYWHERE:
            # Reasoning may mention a call. Where nothing closes it, the model forgot to.
            call, call_hold = self._find([self._markup.calls], "open", final)
            hold = min(hold, call_hold if call is None else call.start())
        text = self._buffer[: hold if found is None else found.start()]
        # White space at the end is held back, since it may be the last.
        end = len(text.rstrip())
        begin = len(text) - len(text.lstrip()) if self._drops_space else 0
        if shown := self._markup.shown(text[begin:end]):
            yield Reasoning(shown)
            self._shown.add(self._reasoning.name)
            self._drops_space = False
        if found is not None:
            self._take(found.end())
            self._enter(_State.CONTENT)
        else:
            self._take(len(text) if final else max(end, begin))
            if final and call is not None:
                self._enter(_State.CONTENT)

    def _answer(self, final: bool) -> Iterator[Piece]:
        """Show text up to the next region."""
        found, hold = self._find(self._regions(), "open", final)
        text = self._buffer[: hold if found is None else found.start()]
        yield from self._show(text)
        self._take(len(text))
        if found is None:
            return
        calls, content = self._markup.calls, self._markup.content
        if calls is not None and found.re is calls.open_re:
            if self._calls is Calls.NEVER:
                return  # since that text
            self._opener, self._first_close, self._from = found, 0, 0
            self._state = _State.CALL
        elif self._reasoning is not None and found.re is self._reasoning.open_re:
            yield from map(Reasoning, self._joint(self._reasoning))
            self._enter(_State.REASONING)
        elif content is not None and found.re is content.open_re:
            yield from self._joint(content)
        self._take(len(found.group()))

    def _joint(self, field: Any) -> list[str]:
        """Return what joins a region to an earlier one of its kind."""
        return [field.join] if field.name in self._shown and field.join else []

    def _regions(self) -> list[ResponseTemplateField]:
        """Return the regions that may begin in the text of an answer."""
        if self._forced is not None:
            return []
        markup, regions = self._markup, [self._markup.content]
        if not self._is_content:
            if self._count or markup.joint_is_token:
                regions.append(markup.joint)
            if self._calls is not Calls.NEVER:
                regions.append(markup.calls)
            if markup.reasoning is not None and markup.reasoning.repeats:
                regions.append(markup.reasoning)
        return [each for each in regions if each is not None and each.open_re is not None]

    def _collect(self, final: bool) -> Iterator[Piece]:
        """Read calls that a grammar forced, at the end."""
        if not final:
            return
        assert self._forced is not None
        text = self._buffer.lstrip() if self._drops_space else self._buffer
        self._take(len(self._buffer))
        for name, arguments in self._forced.read(self._markup.whole(text), list(self._tools)):
            yield self._new_call(name, arguments)
        if not self._count:
            yield from self._show(text)

    def _call(self, final: bool) -> Iterator[Piece]:
        """Read a call whose end may have arrived."""
        field: Any = self._markup.calls
        closer = field.open_re if field.close_re is None else field.close_re
        while True:
            found = closer.search(self._buffer, self._from, partial=not final)
            if not final and (found is None or _may_grow(found, field, "close")):
                self._from = len(self._buffer) if found is None else found.start()
                return
            # At the end of the answer, the closing text may be cut off.
            cut = closer.search(self._buffer, self._from, partial=True) if found is None else found
            end = len(self._buffer) if cut is None else cut.start()
            after = len(self._buffer)
            if found is not None:
                after = found.start() if field.close_re is None else found.end()
            calls, in_string = self._parsed(
                self._buffer[:end], found is not None or field.close_re is None
            )
            if calls:
                self._take(after)
                self._enter(_State.CONTENT)
                for name, arguments in calls[: 1 if self._one_call else None]:
                    yield self._new_call(name, arguments)
                self.ended = self._one_call
                return
            self._first_close = self._first_close or after
            if found is None or not in_string:
                break
            # The closing text is part of an argument, or the first call is garbled.
            # An empty match, before the next call, is found once.
            self._from = max(after, found.start() + 1)
        # No call begins here, but one may before the closing text.
        openers = field.open_re.finditer(self._buffer, endpos=self._first_close)
        end = max((opener.start() for opener in openers), default=self._first_close)
        text = self._opener.group() + self._buffer[:end]
        self._take(end)
        self._state = _State.CONTENT
        yield from self._show(text)

    def _parsed(self, body: str, is_closed: bool) -> tuple[list[tuple[str, str]], bool]:
        """Return name and arguments of the calls in a region, and whether it ends inside a JSON string."""
        field: Any = self._markup.calls
        if not is_closed and field.content != "json":
            return [], False
        captures = {
            name: self._markup.whole(text).strip()
            for name, text in self._opener.groupdict().items()
            if text is not None
        }
        try:
            value = process_field(self._markup.whole(body), field, captures)
            calls = value if isinstance(value, list) else [value]
            return [self._checked(each["function"]) for each in calls], False
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            cause = error.__cause__
            unterminated = isinstance(cause, json.JSONDecodeError) and "Unterminated" in cause.msg
            return [], unterminated

    def _checked(self, function: Any) -> tuple[str, str]:
        """Return name and arguments, as JSON. Raises ValueError, KeyError or TypeError if this is no call."""
        name, arguments = function["name"], function["arguments"]
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            raise ValueError("not a name and an object")
        if self._markup.calls and self._markup.calls.content == "xml-inline":
            schema = self._tools.get(name)
            properties = schema.get("properties", {}) if isinstance(schema, dict) else {}
            arguments = {key: _typed(text, properties.get(key)) for key, text in arguments.items()}
        return name, json.dumps(arguments, ensure_ascii=False)

    def _new_call(self, name: str, arguments: str) -> Call:
        call = Call(self._count, name, arguments)
        family = self._markup.family
        if family is not None and family.call_id is not None:
            number = str(self._earlier + self._count)
            call_id = family.call_id.replace("{name}", name).replace("{index}", number)
            call = replace(call, id=call_id)
        self._count += 1
        return call

    def _show(self, text: str) -> Iterator[str]:
        if self._drops_space:
            text = text.lstrip()
        text = self._markup.shown(text)
        if text:
            self._shown.add("content")
            self._drops_space = False
            if self._calls is Calls.INSTEAD:
                self._calls, self._is_content = Calls.NEVER, True
            yield text

    def _enter(self, state: _State) -> None:
        self._state, self._drops_space = state, True

    def _take(self, length: int) -> None:
        self._buffer = self._buffer[length:]

    def _find(
        self, fields: Sequence[ResponseTemplateField], end: str, final: bool
    ) -> tuple[Any, int]:
        """Find the first delimiter of some regions in the buffer.

        Returns:
            The match, or None; without one, the length of the text that cannot be part of a delimiter.
        """
        best, hold = None, len(self._buffer)
        for field in fields:
            pattern = field.open_re if end == "open" else field.close_re
            found = pattern.search(self._buffer, partial=not final)
            if found is None:
                continue
            if not final and _may_grow(found, field, end):
                hold = min(hold, found.start())
            elif best is None or (found.start(), -found.end()) < (best.start(), -best.end()):
                best = found
        return (None if best is not None and best.start() >= hold else best), hold


def _may_grow(found: Any, field: Any, end: str) -> bool:
    """Whether more text may complete or lengthen a match of a region's delimiter."""
    if (field.open_literals if end == "open" else field.close_literals) is not None:
        return bool(found.partial)
    # A match with an optional end is not partial where this has begun.
    return found.re.fullmatch(found.string, found.start(), partial=True) is not None


def _typed(text: Any, schema: Any) -> Any:
    """Return the value that a parameter's text stands for, by the type in its JSON schema."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if not isinstance(text, str) or kind in (None, "string"):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text
