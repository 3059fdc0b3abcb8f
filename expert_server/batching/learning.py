"""What the window learns: what a batch costs, and who comes in time."""

from __future__ import annotations

__all__ = ["BatchCost", "Companion"]

# About the last 64 batches count.
_GAIN = 1 / 64
# How much tokens must vary, relative to their mean, before a slope is believed.
_LEAST_SPREAD = 0.1
_MOST_MISSES = 8


class BatchCost:
    """A line through the last batches' times: fixed cost, and cost per token (least squares).

    While all batches have about as many tokens, all of the time is taken to be fixed: then a wait is tried,
    and a joint batch shows what a token costs.
    """

    def __init__(self) -> None:
        self._seen = 0
        # Weighted means of tokens, seconds, tokens^2, tokens * seconds.
        self._t = self._s = self._tt = self._ts = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """A batch of so many tokens took so long."""
        self._seen += 1
        gain = max(_GAIN, 1 / self._seen)
        self._t += gain * (tokens - self._t)
        self._s += gain * (seconds - self._s)
        self._tt += gain * (tokens * tokens - self._tt)
        self._ts += gain * (tokens * seconds - self._ts)

    @property
    def fixed_s(self) -> float:
        """What a batch takes, however few tokens it has."""
        variance = self._tt - self._t * self._t
        if variance <= (_LEAST_SPREAD * self._t) ** 2:
            return self._s
        slope = (self._ts - self._t * self._s) / variance
        return max(0.0, self._s - max(0.0, slope) * self._t)


class Companion:
    """One connection: whether it is there, and whether waiting for it has been worth while.

    After each wait in vain, twice as many chances are let pass before the next one is tried (256 at
    most), and one that was not in vain starts that anew. So the end of a client's step costs little, and a
    client that never comes in time costs hardly anything.

    Attributes:
        layer: Of its last request.
        silent_since: When it got its last answer; None while it is present (see `policies`).
    """

    __slots__ = ("_misses", "_open", "_pass_over", "layer", "silent_since")

    def __init__(self) -> None:
        self.layer = -1
        self.silent_since: float | None = None
        self._open = 0
        self._misses = 0
        self._pass_over = 0

    def wrote(self, layer: int) -> None:
        """It wrote a request."""
        self.layer = layer
        self.silent_since = None
        self._open += 1

    def was_answered(self, now: float) -> None:
        """One of its requests has its answer."""
        self._open -= 1
        if self._open == 0:
            self.silent_since = now

    def is_worth_a_try(self) -> bool:
        """Whether to wait for it this time. Ask once for each chance."""
        if self._pass_over:
            self._pass_over -= 1
            return False
        return True

    def tried(self, *, came: bool) -> None:
        """It was waited for, and came in time or did not."""
        self._misses = 0 if came else min(self._misses + 1, _MOST_MISSES)
        self._pass_over = 2**self._misses if self._misses else 0
