"""Stop strings: cutting a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopStrings"]


class StopStrings:
    """Lets text through up to the first stop string.

    Of several, the one that is complete first wins (of those, the longest), so the result does not
    depend on how the text was cut into pieces. Text that may still become one is held back. What is
    complete within text that is not to be searched is none; one may begin there.

    Args:
        stops: The stop strings, none of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched = False

    def push(self, text: str, *, search: bool = True) -> str:
        """What may be shown after this piece. After a match nothing more comes."""
        if self.matched:
            return ""
        buffer, seen = self._held + text, len(self._held)
        ends = [
            (start + len(stop), start)
            for stop in self._stops
            if (start := buffer.find(stop, max(0, seen - len(stop) + 1))) >= 0
        ]
        if search and ends:
            self.matched = True
            self._held = ""
            return buffer[: min(ends)[1]]
        keep = self._undecided(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """What was held back, once the text is over without a match."""
        held, self._held = self._held, ""
        return held

    def _undecided(self, buffer: str) -> int:
        """Length of the longest end of buffer that a stop string begins with."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for size in range(min(longest, len(buffer)), 0, -1):
            if any(stop.startswith(buffer[-size:]) for stop in self._stops):
                return size
        return 0
