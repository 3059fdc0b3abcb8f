"""The format in which a model writes calls that a grammar forces, and their reading from such an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["BARE", "JSON_LIST", "CallFormat"]

_INDEX = "{index}"


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
