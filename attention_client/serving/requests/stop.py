"""Finds stop strings in an answer's text, which arrives in pieces on the HTTP event loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

__all__ = ["StopStrings"]


class StopStrings:
    """Passes an answer's text up to the first stop string, or with it.

    The string that is complete first wins; among several, the longest. So the result does not depend on how
    the text is split into pieces. Text that may be the beginning of a stop string is held back. A string
    that ends in unsearched text does not match; a match may begin there. Each character is held back and
    passed once, so its cost does not depend on the text before it.

    Attributes:
        matched: The stop string that was found; None: none yet.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._first = {stop[0] for stop in stops}
        self._include = include
        # The characters held back, each with the marks of tokens (`families.markup`) before it, and without.
        self._held: deque[str] = deque()
        self._letters = ""
        self._marks = ""
        self.matched: str | None = None

    def push(self, text: str, *, search: bool = True) -> str:
        """Add a piece of text; return the text that can be shown. After a match this is empty."""
        if self.matched:
            return ""
        if not self._letters and self._first.isdisjoint(text):
            return text  # the usual case
        shown = ""
        for character in text:
            self._marks += character
            if "\ud800" <= character <= "\udfff":
                continue
            self._held.append(self._marks)
            self._letters, self._marks = self._letters + character, ""
            complete = [stop for stop in self._stops if self._letters.endswith(stop)]
            if complete and search:
                self.matched = complete[0]
                cut = 0 if self._include else len(self.matched)
                shown += self._pass(len(self._held) - cut)
                self._held.clear()
                return shown
            while not self._may_begin():
                shown += self._pass(1)
        if not self._letters:
            shown, self._marks = shown + self._marks, ""
        return shown

    def flush(self) -> str:
        """Return the text held back, at the end of a text without a match."""
        return self._pass(len(self._held)) + self._marks

    def _may_begin(self) -> bool:
        """Whether the text held back is the beginning of a stop string, and not the whole."""
        held = self._letters
        return any(stop.startswith(held) and len(held) < len(stop) for stop in self._stops)

    def _pass(self, count: int) -> str:
        self._letters = self._letters[count:]
        return "".join(self._held.popleft() for _ in range(count))
