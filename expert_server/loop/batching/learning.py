"""What an expert server's policy `Window` learns: a batch's cost, and which connections write in time."""

from __future__ import annotations

__all__ = ["BatchCost", "Companion"]

# About the last 64 batches count.
_GAIN = 1 / 64
# Least spread of the tokens, relative to their mean, for a slope to count.
_MIN_SPREAD = 0.1
_MAX_MISSES = 8


class BatchCost:
    """Estimates a batch's fixed cost and cost per token: least squares over the last batches.

    While all batches have about as many tokens, the whole time counts as fixed. The window then tries a wait,
    and the joint batch shows the cost per token.
    """

    def __init__(self) -> None:
        self._seen = 0
        # Weighted means of tokens, seconds, tokens^2, tokens * seconds.
        self._t = self._s = self._tt = self._ts = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """Update the estimate by the tokens and the time of a computed batch; old batches lose weight."""
        self._seen += 1
        gain = max(_GAIN, 1 / self._seen)
        self._t += gain * (tokens - self._t)
        self._s += gain * (seconds - self._s)
        self._tt += gain * (tokens * tokens - self._tt)
        self._ts += gain * (tokens * seconds - self._ts)

    @property
    def fixed_s(self) -> float:
        """Seconds that a batch takes regardless of its tokens: the saving if two batches become one."""
        variance = self._tt - self._t * self._t
        if variance <= (_MIN_SPREAD * self._t) ** 2:
            return self._s
        slope = (self._ts - self._t * self._s) / variance
        return max(0.0, self._s - max(0.0, slope) * self._t)


class Companion:
    """State of one client connection: whether it is present, and whether waiting for it has paid off.

    Each wait in vain doubles the number of chances skipped before the next try (256 at most); a successful
    wait resets it. So the end of a client's step costs little, and a client that is never in time costs next
    to nothing.

    Attributes:
        layer: Layer of its last request.
        silent_since: When it got its last answer; None while it is present (see `policies`).
    """

    __slots__ = ("_misses", "_open", "_skip", "layer", "silent_since")

    def __init__(self) -> None:
        self.layer = -1
        self.silent_since: float | None = None
        self._open = 0
        self._misses = 0
        self._skip = 0

    def wrote(self, layer: int) -> None:
        """Record an admitted request for this layer: the connection is present, and no batch waits for it."""
        self.layer = layer
        self.silent_since = None
        self._open += 1

    def was_answered(self, now: float) -> None:
        """Record an answer; after the last open one the connection is silent, and a batch may wait for it."""
        self._open -= 1
        if self._open == 0:
            self.silent_since = now

    def is_worth_a_try(self) -> bool:
        """Whether the next batch should wait for this connection. Once per batch: False uses up a skip."""
        if self._skip:
            self._skip -= 1
            return False
        return True

    def tried(self, *, came: bool) -> None:
        """Record whether the connection wrote in time when a batch waited for it; if not, skip longer."""
        self._misses = 0 if came else min(self._misses + 1, _MAX_MISSES)
        self._skip = 2**self._misses if self._misses else 0
