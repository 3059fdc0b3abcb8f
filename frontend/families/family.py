"""Families of models that write answers alike, their formats of calls, and the choice of a checkpoint's."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Self

from transformers.utils.chat_parsing.content_parsers import CONTENT_PARSERS
from transformers.utils.chat_parsing.response_templates import load_response_template

from eaas.errors import ConfigError

__all__ = ["BARE", "JSON_LIST", "CallFormat", "Family", "pythonic"]

_INDEX = "{index}"
_JSON_NAMES = {"true": True, "false": False, "null": None}
_FORM = "a JSON object with response_template and, optionally, needs, call, call_id and content"


@dataclass(frozen=True)
class CallFormat:
    """An answer of calls: start, calls with a separator between them, end.

    Attributes:
        text: One call, with {name} or without it, then {arguments}, a JSON object. {index}: a number.
        start: What goes before the first call.
        separator: What goes between two calls.
        end: What goes after the last call.
    """

    text: str
    start: str = ""
    separator: str = ""
    end: str = ""

    @property
    def tail(self) -> str:
        """What goes after the arguments of a call."""
        return self.text.partition("{arguments}")[2]

    def head(self, name: str) -> list[str]:
        """Return what goes before the arguments of a call of a function, in parts between numbers."""
        head = self.text.partition("{arguments}")[0]
        written = json.dumps(name, ensure_ascii=False)[1:-1] if '"{name}"' in head else name
        return [part.replace("{name}", written) for part in head.split(_INDEX)]

    def read(self, text: str, names: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Yield name and arguments of each call in an answer that has this format, perhaps cut off.

        The arguments of a call that is cut off are incomplete JSON.

        Args:
            text: The answer.
            names: Names of the functions; a format without {name} has one.
        """
        # A name may begin with another one.
        longest_first = sorted(names, key=len, reverse=True)
        heads = {name: r"\d+".join(map(re.escape, self.head(name))) for name in longest_first}
        decoder, position = json.JSONDecoder(), len(self.start)
        while True:
            found = ((name, re.compile(head).match(text, position)) for name, head in heads.items())
            name, opened = next(filter(lambda each: each[1], found), ("", None))
            # After the first call, nothing follows arguments that have no head.
            if opened is None or opened.end() == len(text) or 0 < position == opened.end():
                return
            try:
                end = decoder.raw_decode(text, opened.end())[1]
            except ValueError:
                end = len(text)
            yield name, text[opened.end() : end]
            position = end + len(self.tail) + len(self.separator)


JSON_LIST = CallFormat('{"name": "{name}", "parameters": {arguments}}', "[", ", ", "]")
"""For models whose own format is unknown or holds no JSON."""
BARE = CallFormat("{arguments}")
"""The arguments of one function that the request names, for such models."""


@dataclass(frozen=True)
class Family:
    """How the models of one family write an answer.

    Attributes:
        name: Name of its file, or of the checkpoint's own template.
        template: transformers' response template.
        needs: Texts of which each is an added token of the family's tokenizers, or in their chat templates.
        call: Format of forced calls; None: it holds no JSON.
        call_id: Form of the ids of calls, with {name} and {index}; None: any.
        content: What the model writes before the text of an answer.
    """

    name: str
    template: dict[str, Any]
    needs: Sequence[str] = ()
    call: CallFormat | None = None
    call_id: str | None = None
    content: str = ""

    @classmethod
    def of(cls, tokenizer: Any, named: str | None = None) -> Family | None:
        """Choose the family of a tokenizer; None: none fits, so answers are text.

        A template in tokenizer_config.json (`response_template`) decides; else the family with the most needs
        that the tokenizer meets; of two, the one that calls tools.

        Args:
            tokenizer: A transformers tokenizer.
            named: A family's name or the path of a file, which decides instead.

        Raises:
            ConfigError: There is no such family or file, or the file is invalid.
        """
        if named is not None:
            return cls.named(named)
        own = getattr(tokenizer, "response_template", None)
        if own is not None:
            return cls._of({"response_template": own}, "tokenizer_config.json")
        templates = tokenizer.chat_template or ""
        shown = templates if isinstance(templates, str) else "".join(templates.values())
        shown += "\n".join(added.content for added in tokenizer.added_tokens_decoder.values())
        fitting = [each for each in _families() if all(text in shown for text in each.needs)]
        return max(
            fitting,
            key=lambda each: (len(each.needs), "tool_calls" in each.template["fields"]),
            default=None,
        )

    @classmethod
    def named(cls, named: str) -> Family:
        """Return the family with a name, or of a file. Raises ConfigError."""
        names = {family.name: family for family in _families()}
        if named in names:
            return names[named]
        path = Path(named)
        if not path.is_file():
            raise ConfigError(
                f"response_template: no family {named!r} and no such file; the families are "
                f"{', '.join(sorted(names))}"
            )
        try:
            return cls._of(json.loads(path.read_text()), str(path))
        except (OSError, ValueError) as error:
            raise ConfigError(f"response_template: {path} cannot be read: {error}") from error

    @classmethod
    def _of(cls, fields: Any, name: str) -> Self:
        try:
            options = dict(fields)
            load_response_template(template := options.pop("response_template"))
            if options.get("call") is not None:
                options["call"] = CallFormat(**options["call"])
            return cls(name, template, **options)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"response_template: {name} is not {_FORM}: {error}") from error


@cache
def _families() -> tuple[Family, ...]:
    files = (each for each in resources.files(__package__).iterdir() if each.name.endswith(".json"))
    return tuple(
        Family._of(json.loads(file.read_text()), file.name.removesuffix(".json")) for file in files
    )


def pythonic(text: str, _options: dict[str, Any]) -> list[dict[str, Any]]:
    """Parse calls in Python, one a line, such as `get_weather(city="Paris", days=3)` (OLMo 3).

    They have keyword arguments only, whose values are literals of Python or of JSON.

    A parser of contents, as transformers' response templates name them.

    Returns:
        {"name": ..., "arguments": {...}} of each call.

    Raises:
        ValueError: The text is something else.
    """
    try:
        return [_call(each) for each in ast.parse(text.strip()).body]
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        # TypeError: a list as a key of an object. The last two: nested too deeply.
        raise ValueError(f"no calls: {error}") from error


def _call(node: ast.stmt) -> dict[str, Any]:
    match node:
        case ast.Expr(ast.Call(func=name, args=[], keywords=keywords)):
            arguments = {each.arg: _value(each.value) for each in keywords}
            if None not in arguments:  # **
                return {"name": ast.unparse(name), "arguments": arguments}
    raise ValueError("no call with keyword arguments")


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Name(name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.List(items):
            return [_value(each) for each in items]
        case ast.Dict(keys, values):
            return {_value(k): _value(v) for k, v in zip(keys, values, strict=True)}  # type: ignore[arg-type]
        case ast.Constant(str(string)):
            # JSON writes a character beyond the 16-bit range as two halves.
            return string.encode("utf-16", "surrogatepass").decode("utf-16")
    return ast.literal_eval(node)


CONTENT_PARSERS["pythonic"] = pythonic
