"""Whether the loop of an expert server still moves: what it notes, and who looks at that.

The heartbeat has a thread of its own, so it says nothing of the loop. The loop notes when it turns and when
it begins a batch; a watchdog reads that. A batch may take long without being stuck, so it has

    max(1.6 s, 4 * tokens * the most seconds a token took in the batches before), 10 s at most

before it counts as stalled; 10 s before any batch has ended. A large batch never takes longer than its
tokens in small batches would, so what decoding took is enough to know how long a prompt may take.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from eaas.log import get_logger

__all__ = ["Pulse", "Watchdog"]

_log = get_logger(__name__)
# With the look, the heartbeat and the news it makes less than a lease of 2 s.
_PATIENCE_S = 1.6
_MARGIN = 4.0
# Nobody waits for an answer any longer (attention_client.layer_timeout_s).
_MOST_S = 10.0
# Of the slowest batch seen, after each one that was faster.
_MEMORY = 0.98
# The next look is when the patience ends, but within these: a pause must not pass for a stall.
_LEAST_LOOK_S, _MOST_LOOK_S = 0.05, 0.5
# More time between two looks: this process did not run, and the loop could not either.
_PAUSE_S = 1.0
_JOIN_S = 3.0


class Pulse:
    """What the loop notes. One thread writes it, any thread reads it.

    Args:
        now: Monotonic seconds.
    """

    def __init__(self, now: float) -> None:
        # Since when it does what it does, and for how many tokens: one object, so that they belong together.
        self._doing = (now, 0)
        self._s_per_token: float | None = None

    def turns(self, at: float) -> None:
        """The loop looks for work; where it sleeps before, `at` is the end of that."""
        self._doing = (at, 0)

    def begins(self, tokens: int, now: float) -> None:
        """A batch."""
        self._doing = (now, tokens)

    def ended(self, tokens: int, seconds: float) -> None:
        """Batches of so many tokens took so long."""
        known = self._s_per_token or 0.0
        self._s_per_token = max(seconds / tokens, _MEMORY * known)

    def stalled_s(self, now: float, awake_from: float) -> float:
        """For how long the loop has not moved, where that is too long; else 0.

        Args:
            now: Monotonic seconds.
            awake_from: The process did not run before this.
        """
        still_s, patience_s = self._still(now, awake_from)
        return still_s if still_s >= patience_s else 0.0

    def patience_left_s(self, now: float, awake_from: float) -> float:
        """In how many seconds it will have stalled if it does not move until then; at most 0 where it has.

        Args:
            now: Monotonic seconds.
            awake_from: The process did not run before this.
        """
        still_s, patience_s = self._still(now, awake_from)
        return patience_s - still_s

    def _still(self, now: float, awake_from: float) -> tuple[float, float]:
        """For how long it has not moved, and for how long that is in order."""
        since, tokens = self._doing
        return now - max(since, awake_from), self._patience_s(tokens)

    def _patience_s(self, tokens: int) -> float:
        if not tokens:
            return _PATIENCE_S
        if self._s_per_token is None:
            return _MOST_S
        return min(_MOST_S, max(_PATIENCE_S, _MARGIN * tokens * self._s_per_token))


class Watchdog:
    """Looks at a pulse from a daemon thread until `close`.

    Args:
        pulse: Of the loop.
        on_change: Called when the loop has stalled, and when it moves again.
        clock: Monotonic seconds.

    Attributes:
        stalled_s: For how long it has not moved, as of the last look; 0 while it moves.
    """

    def __init__(
        self,
        pulse: Pulse,
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pulse = pulse
        self._on_change = on_change
        self._clock = clock
        self.stalled_s = 0.0
        self._looked_at = self._awake_from = clock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._looked_at = self._awake_from = self._clock()
        self._thread.start()

    def close(self) -> None:
        """Look no more. Idempotent."""
        self._over.set()
        self._thread.join(_JOIN_S)

    def look(self) -> None:
        """One look."""
        now = self._clock()
        if now - self._looked_at > _PAUSE_S:
            self._awake_from = now
        self._looked_at = now
        before, self.stalled_s = self.stalled_s, self._pulse.stalled_s(now, self._awake_from)
        if bool(before) == bool(self.stalled_s):
            return
        if self.stalled_s:
            _log.error("the loop has not moved for %.1f s: not serving", self.stalled_s)
        else:
            _log.warning("the loop moves again, after %.1f s", before)
        self._on_change()

    def _run(self) -> None:
        pause_s = 0.0
        while not self._over.wait(pause_s):
            self.look()
            left_s = self._pulse.patience_left_s(self._clock(), self._awake_from)
            pause_s = min(max(_LEAST_LOOK_S, left_s), _MOST_LOOK_S)
