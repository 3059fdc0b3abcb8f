"""The text of an answer on the HTTP event loop: tokens become text, which ends at a stop string."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["Detokenizer", "StopStrings"]


class Detokenizer:
    """Converts tokens to text, and returns text as soon as later tokens cannot change it.

    Each call decodes a short window. A token whose bytes end inside a character (decoded as U+FFFD) waits
    for the next one. All pieces together equal ``tokenizer.decode`` of all tokens.

    Args:
        tokenizer: A transformers tokenizer.
        skip_special_tokens: Whether the text has no special tokens.
        shown: The text of some tokens, in place of the tokenizer's.
    """

    def __init__(
        self, tokenizer: Any, *, skip_special_tokens: bool, shown: Mapping[int, str] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._text_of = shown or {}
        # The last tokens whose text was returned, and those after them.
        self._window: list[int] = []
        self._shown = 0  # number of the former

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=self._skip))

    def push(self, token: int) -> str:
        """Add a token of the answer; return the text that it completes, empty until later tokens fix it."""
        if token in self._text_of:
            return self.flush() + self._text_of[token]
        self._window.append(token)
        return self._advance(final=False)

    def flush(self) -> str:
        """Return the text still held back, an incomplete character, after the last token of the answer."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        before = self._decode(self._window[: self._shown])
        text = self._decode(self._window)
        if len(text) <= len(before) or (text.endswith("\ufffd") and not final):
            return ""
        del self._window[: self._shown]
        self._shown = len(self._window)
        return text[len(before) :]


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
