"""Finds stop strings in an answer's text, which arrives in pieces on the HTTP event loop."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopStrings"]


class _Matcher:
    """Matches one stop string against the end of a text (Knuth, Morris and Pratt, 1977).

    The cost of a character does not depend on the length of the string.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        # For each prefix length: the length of the longest shorter prefix that is also its suffix.
        self._shorter = [0] * (len(stop) + 1)
        self._length = 0
        for end in range(1, len(stop)):
            self.push(stop[end])
            self._shorter[end + 1] = self._length
        self._length = 0

    @property
    def begun(self) -> int:
        """Length of the text's longest suffix that is a proper prefix of the string: text to hold back."""
        return self._length if self._length < len(self.stop) else self._shorter[self._length]

    def push(self, character: str) -> bool:
        """Add a character of the text; return whether it completes the stop string."""
        length = self.begun
        while length and self.stop[length] != character:
            length = self._shorter[length]
        self._length = length + (self.stop[length] == character)
        return self._length == len(self.stop)


class StopStrings:
    """Passes an answer's text up to the first stop string, or with it.

    The string that is complete first wins; among several, the longest. So the result does not depend on how
    the text is split into pieces. Text that may be the beginning of a stop string is held back. A string
    that ends in unsearched text does not match; a match may begin there. Each character is read once.

    Attributes:
        matched: The stop string that was found; None: none yet.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._matchers = [_Matcher(stop) for stop in dict.fromkeys(stops)]
        self._include = include
        self._held = ""
        self._has_marks = False
        self.matched: str | None = None

    def push(self, text: str, *, search: bool = True) -> str:
        """Add a piece of text; return the text that can be shown. After a match this is empty."""
        if self.matched:
            return ""
        buffer = self._held + text
        for end, character in enumerate(text, len(self._held) + 1):
            if _is_mark(character):
                self._has_marks = True
                continue
            complete = [matcher.stop for matcher in self._matchers if matcher.push(character)]
            if complete and search:
                self.matched = max(complete, key=len)
                self._held = ""
                begin = self._before(buffer, end, len(self.matched))
                return buffer[: end if self._include else begin]
        begun = max((matcher.begun for matcher in self._matchers), default=0)
        kept = self._before(buffer, len(buffer), begun)
        self._held = buffer[kept:]
        return buffer[:kept]

    def flush(self) -> str:
        """Return the text held back, at the end of a text without a match."""
        held, self._held = self._held, ""
        return held

    def _before(self, text: str, end: int, count: int) -> int:
        """Return where the last characters before a place begin, of which marks do not count."""
        if not self._has_marks:
            return end - count
        while count:
            end -= 1
            count -= not _is_mark(text[end])
        return end


def _is_mark(character: str) -> bool:
    """Whether this is a token's mark (`families.markup`), which is no text."""
    return "\ud800" <= character <= "\udfff"
