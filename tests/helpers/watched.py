"""An object whose method calls a test sees before they happen."""

from __future__ import annotations

from collections.abc import Callable


class Watched:
    """Wraps an object; `before` is called with the name of each method before its call."""

    def __init__(self, of: object, before: Callable[[str], object]) -> None:
        self._of, self._before = of, before

    def __getattr__(self, name: str) -> object:
        found = getattr(self._of, name)

        def call(*args: object) -> object:
            self._before(name)
            return found(*args)

        return call if callable(found) else found
