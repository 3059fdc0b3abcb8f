"""The form of earlier tool calls and their results that a model's chat template shows whole.

Templates differ in what they demand, and what they do not expect they refuse, or leave out without a word.
So a sample conversation is rendered in each form, and the first one that is shown whole is the template's.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import operator
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

from pydantic_core import from_json

from eaas.generation.errors import ApiError
from frontend.prompts.body import check_depth

__all__ = ["History", "history_form", "is_plain"]

_Message = dict[str, Any]

_LONGEST_ID = 40  # OpenAI's limit


class History(NamedTuple):
    """A form of histories.

    Attributes:
        arguments: "object", and as text what cannot be parsed; "mapping": that, too, in an object; or "text".
        ids: "any"; "nine" letters and digits (Mistral); "named", `functions.NAME:NUMBER` (Kimi).
        content: Of a message with nothing but calls.
        text: The text of a message with calls: "beside" them; "before" them in a message of its own; or
            "joined", one such message in each turn, for templates whose roles alternate.
        calls: "together"; "single", one a message and its result after it; "written" as JSON in the text.
        results: The role of a tool's result. If the template has none, the user tells it.
        systems: The role of a system message that is not the first message, likewise.
    """

    # The first value of each is the simplest.
    arguments: Literal["object", "mapping", "text"] = "object"
    ids: Literal["any", "nine", "named"] = "any"
    content: Literal["", None] = ""
    text: Literal["beside", "before", "joined"] = "beside"
    calls: Literal["together", "single", "written"] = "together"
    results: Literal["tool", "user"] = "tool"
    systems: Literal["system", "user"] = "system"

    def of(self, messages: Iterable[_Message]) -> list[_Message]:
        """Return messages (of `Message.for_template`) in this form."""
        messages = self._linked(messages)
        if self.calls == "single":
            messages = _singly(messages)
        elif self.calls == "written":
            messages = map(_written, messages)
        return self._told(self._parted(messages))

    def _linked(self, messages: Iterable[_Message]) -> Iterator[_Message]:
        """Set the arguments, and the same id in a call and its result. Without ids, order tells."""
        ids: dict[str, str] = {}
        waiting: deque[str] = deque()
        number = itertools.count()
        for message in messages:
            fields: _Message = {}
            if "tool_calls" in message:
                waiting.clear()
                fields["tool_calls"] = calls = []
                for call, at in zip(message["tool_calls"], number, strict=False):
                    function = call["function"]
                    sent = call["id"] or f"call{at}"
                    ids[sent] = self._id(sent, function["name"], at)
                    waiting.append(ids[sent])
                    function = function | {"arguments": self._parsed(function["arguments"])}
                    calls.append(call | {"id": ids[sent], "function": function})
            elif message["role"] == "tool":
                sent = message.get("tool_call_id", "")
                found = ids.get(sent) or (waiting.popleft() if waiting and not sent else "")
                fields["tool_call_id"] = found or self._id(sent)
            yield message | fields

    def _id(self, sent: str, name: str | None = None, number: int = 0) -> str:
        if self.ids == "named":
            fits = name is None or re.fullmatch(rf"functions\.{re.escape(name)}:\d+", sent)
            return sent if fits else f"functions.{name}:{number}"
        nine = re.fullmatch("[A-Za-z0-9]{9}", sent)
        if nine or (self.ids == "any" and 0 < len(sent) <= _LONGEST_ID):
            return sent
        return hashlib.sha256(sent.encode()).hexdigest()[:9]

    def _parsed(self, text: str) -> Any:
        if self.arguments == "text":
            return text
        try:
            found = from_json(text)  # refuses escapes of what UTF-8 cannot encode
            check_depth(found)
            if isinstance(found, dict):
                return found
        except ValueError:
            pass  # cut off by a limit, or never JSON
        return {"arguments": text} if self.arguments == "mapping" else text

    def _parted(self, messages: Iterable[_Message]) -> Iterator[_Message]:
        """Place the texts of messages that have calls."""
        done: list[_Message] = []
        at = None  # where the turn's text stands
        for message in messages:
            text, calls = message["content"], "tool_calls" in message
            if message["role"] == "user":
                at = None
            elif message["role"] == "assistant" and text and self.text != "beside":
                if self.text == "joined" and at is not None:
                    text = f"{done[at].pop('content')}\n{text}"
                at = len(done)
                if calls:
                    done.append({"role": "assistant", "content": text})
                    text = ""
            done.append(message | {"content": text if text or not calls else self.content})
        return (message for message in done if "content" in message)

    def _told(self, messages: Iterable[_Message]) -> list[_Message]:
        """Let the user tell what nobody else may. His messages in a row become one: roles may alternate."""
        foreign = {"tool": self.results == "user", "system": self.systems == "user"}
        done: list[_Message] = []
        for message in messages:
            role, text = message["role"], message["content"]
            if foreign.get(role) and done:
                text = f"<tool_response>\n{text}\n</tool_response>" if role == "tool" else text
                message = {"role": "user", "content": text}
            if any(foreign.values()) and done and done[-1]["role"] == message["role"] == "user":
                message = message | {"content": f"{done.pop()['content']}\n{text}"}
            done.append(message)
        return done


def _singly(messages: Iterable[_Message]) -> list[_Message]:
    """Split messages with several calls, each followed by its results."""
    done: list[tuple[int, _Message]] = []
    places: dict[str, int] = {}  # of calls, by id
    for message in messages:
        place = len(done)
        for call in message.get("tool_calls", ()):
            places[call["id"]] = len(done)
            done.append((len(done), message | {"tool_calls": [call]}))
            message = {"role": "assistant", "content": ""}
        if message["role"] == "tool":
            place = places.get(message["tool_call_id"], place)
        if place == len(done) or message["role"] == "tool":
            done.append((place, message))
    return [message for _, message in sorted(done, key=operator.itemgetter(0))]


def _written(message: _Message) -> _Message:
    """Write calls as the endpoint makes models write them that have no format of their own."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    if not calls:
        return message
    told = [{"name": call["name"], "parameters": call["arguments"]} for call in calls]
    text = f"{message['content']}\n{json.dumps(told, ensure_ascii=False)}".strip("\n")
    return {"role": "assistant", "content": text}


def is_plain(messages: list[_Message]) -> bool:
    """Say whether every template takes messages as they are: texts only, and the system's first."""
    rest = messages[messages[0]["role"] == "system" :]
    return all(m["role"] in ("user", "assistant") and "tool_calls" not in m for m in rest)


# The simplest first; a template's own form of calls before any other.
_FORMS = sorted(
    itertools.starmap(History, itertools.product(*map(get_args, get_type_hints(History).values()))),
    key=lambda form: (form.calls == "written", sum(map(operator.ne, form, History()))),
)


def _call(word: str, arguments: str) -> _Message:
    # Longer than nine characters, as most clients' ids are, and without the name, which Kimi's must have.
    function = {"name": word, "arguments": arguments}
    return {"id": f"call_sample{word[-2:]}", "type": "function", "function": function}


_FIRST = [_call("mark03", '{"mark04": "mark05"}'), _call("mark06", '{"": "mark07')]
_SAMPLE: list[_Message] = [
    {"role": "user", "content": "mark01"},
    {"role": "assistant", "content": "mark02", "reasoning_content": "so", "tool_calls": _FIRST},
    {"role": "tool", "tool_call_id": "call_sample03", "content": "mark08"},
    {"role": "tool", "tool_call_id": "call_sample06", "content": "mark09"},
    {"role": "assistant", "content": "", "tool_calls": [_call("mark10", "{}")]},
    {"role": "tool", "tool_call_id": "call_sample10", "content": "mark11"},
    {"role": "assistant", "content": "mark12"},
    {"role": "system", "content": "mark13"},
    {"role": "user", "content": "mark14"},
]
_MARKS = [f"mark{number:02}" for number in range(1, 15)]


def history_form(render: Callable[[list[_Message]], str]) -> History:
    """Find the form of a template's histories: of the simplest ones, the first that it shows whole.

    Args:
        render: Applies the template to messages. Raises ApiError if that fails.
    """
    best, most = _FORMS[0], 0
    for form in _FORMS:
        try:
            text = render(form.of(_SAMPLE))
        except ApiError:
            continue  # this form is not the template's
        # Python's quotes: the template prints an object where it expects text.
        shown = 0 if "'mark04'" in text else sum(mark in text for mark in _MARKS)
        if shown > most:
            best, most = form, shown
        if most == len(_MARKS):
            break
    return best
