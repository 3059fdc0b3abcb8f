"""Stop strings: cutting a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopStrings"]


class _Matcher:
    """How far the end of a text has come in one stop string (Knuth, Morris and Pratt, 1977).

    The work for a character does not grow with the string.
    """

    def __init__(self, stop: str) -> None:
        self._stop = stop
        # For each length of a beginning of the string: the longest shorter one that is its end as well.
        self._shorter = [0] * (len(stop) + 1)
        self._length = 0
        for end in range(1, len(stop)):
            self.push(stop[end])
            self._shorter[end + 1] = self._length
        self._length = 0

    @property
    def size(self) -> int:
        """Characters of the stop string."""
        return len(self._stop)

    @property
    def begun(self) -> int:
        """Length of the longest end of the text that the string begins with and does not end with."""
        return self._length if self._length < len(self._stop) else self._shorter[self._length]

    def push(self, character: str) -> bool:
        """Whether the string is complete with this character."""
        length = self.begun
        while length and self._stop[length] != character:
            length = self._shorter[length]
        self._length = length + (self._stop[length] == character)
        return self._length == len(self._stop)


class StopStrings:
    """Lets text through up to the first stop string.

    Of several, the one that is complete first wins (of those, the longest), so the result does not
    depend on how the text was cut into pieces. Text that may still become one is held back. What is
    complete within text that is not to be searched is none; one may begin there.

    Each character of the text is looked at once.

    Args:
        stops: The stop strings, none of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._matchers = [_Matcher(stop) for stop in dict.fromkeys(stops)]
        self._held = ""
        self.matched = False

    def push(self, text: str, *, search: bool = True) -> str:
        """What may be shown after this piece. After a match nothing more comes."""
        if self.matched:
            return ""
        buffer = self._held + text
        for end, character in enumerate(text, len(self._held) + 1):
            complete = [matcher.size for matcher in self._matchers if matcher.push(character)]
            if complete and search:
                self.matched = True
                self._held = ""
                return buffer[: end - max(complete)]
        keep = max((matcher.begun for matcher in self._matchers), default=0)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """What was held back, once the text is over without a match."""
        held, self._held = self._held, ""
        return held
