"""Finds stop strings in an answer's text, which arrives in pieces on the HTTP event loop."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopStrings"]


class _Matcher:
    """Matches one stop string against the end of a text (Knuth, Morris and Pratt, 1977).

    The cost of a character does not depend on the length of the string.
    """

    def __init__(self, stop: str) -> None:
        self._stop = stop
        # For each prefix length: the length of the longest shorter prefix that is also its suffix.
        self._shorter = [0] * (len(stop) + 1)
        self._length = 0
        for end in range(1, len(stop)):
            self.push(stop[end])
            self._shorter[end + 1] = self._length
        self._length = 0

    @property
    def size(self) -> int:
        """Length of the stop string, which a match cuts from the answer."""
        return len(self._stop)

    @property
    def begun(self) -> int:
        """Length of the text's longest suffix that is a proper prefix of the string: text to hold back."""
        return self._length if self._length < len(self._stop) else self._shorter[self._length]

    def push(self, character: str) -> bool:
        """Add a character of the text; return whether it completes the stop string."""
        length = self.begun
        while length and self._stop[length] != character:
            length = self._shorter[length]
        self._length = length + (self._stop[length] == character)
        return self._length == len(self._stop)


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
        self.matched: str | None = None

    def push(self, text: str, *, search: bool = True) -> str:
        """Add a piece of text; return the text that can be shown. After a match this is empty."""
        if self.matched:
            return ""
        buffer = self._held + text
        for end, character in enumerate(text, len(self._held) + 1):
            if "\ud800" <= character <= "\udfff":
                continue  # a token's mark (`families.markup`)
            complete = [matcher.size for matcher in self._matchers if matcher.push(character)]
            if complete and search:
                begin = end - max(complete)
                self.matched = buffer[begin:end]
                self._held = ""
                return buffer[: end if self._include else begin]
        keep = max((matcher.begun for matcher in self._matchers), default=0)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """Return the text held back, at the end of a text without a match."""
        held, self._held = self._held, ""
        return held
