"""Liveness of the expert server's loop, and the watchdog that reports a stall to the monitor.

The heartbeat has its own thread, so it proves nothing about the loop. The loop notes each turn and each
batch; a watchdog reads these notes. A long batch is not a stall, so a batch counts as stalled only after

    max(1.6 s, 4 * tokens * the most seconds a token took in the batches before), 10 s at most

or after 10 s while no batch has ended yet. A large batch never takes longer than its tokens in small batches
would, so decoding times bound how long a prompt may take.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from eaas.log import get_logger
from expert_server.loop._slots import Slots

__all__ = ["Liveness", "Watchdog"]

_log = get_logger(__name__)
# With the watchdog's pause, a heartbeat and the membership update, this fits in a lease of 2 s.
_PATIENCE_S = 1.6
_MARGIN = 4.0
# No client waits longer for an answer (attention_client.layer_timeout_s).
_MAX_PATIENCE_S = 10.0
# Decay of the slowest batch seen, per faster batch.
_DECAY = 0.98
# Limits of the pause between two checks, which otherwise lasts until the timeout expires. The upper limit
# keeps a suspended process from passing for a stalled loop.
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.05, 0.5
# After more time than this between two checks, the process was suspended, and the loop with it.
_SUSPENDED_S = 1.0
_JOIN_S = 3.0


class Liveness:
    """The loop's notes of its current activity. The loop's thread writes them, any thread reads them.

    Args:
        now: Monotonic seconds.
    """

    def __init__(self, now: float) -> None:
        # The start of the present activity and its tokens: one tuple, so that readers see both together.
        self._doing = (now, 0)
        self._s_per_token: float | None = None
        # The same, while compiled code serves.
        self._compiled: Slots | None = None

    def turns(self, at: float) -> None:
        """Note that the loop looks for work: a stall counts from `at`, which is after its sleep, if any."""
        self._doing = (at, 0)

    def begins(self, tokens: int, now: float) -> None:
        """Note that the loop begins a batch; its number of tokens decides how long it may take."""
        self._doing = (now, tokens)

    def ended(self, tokens: int, seconds: float) -> None:
        """Note the tokens and seconds of a layer's batches: they set how long later batches may take."""
        known = self._s_per_token or 0.0
        self._s_per_token = max(seconds / tokens, _DECAY * known)

    @contextlib.contextmanager
    def compiled(self, slots: Slots) -> Iterator[None]:
        """Read the loop's activity from compiled code inside the block."""
        self._compiled = slots
        try:
            yield
        finally:
            self._compiled = None

    def still(self, now: float, awake_from: float) -> tuple[float, float]:
        """Return for how long the loop has not moved, and for how long it may, in seconds; for the watchdog.

        Args:
            now: Monotonic seconds.
            awake_from: When the process was last resumed, in monotonic seconds.
        """
        compiled = self._compiled
        since, tokens = self._doing if compiled is None else compiled.doing
        return now - max(since, awake_from), self._patience_s(tokens)

    def _patience_s(self, tokens: int) -> float:
        if not tokens:
            return _PATIENCE_S
        if self._s_per_token is None:
            return _MAX_PATIENCE_S
        return min(_MAX_PATIENCE_S, max(_PATIENCE_S, _MARGIN * tokens * self._s_per_token))


class Watchdog:
    """Checks the serving loop's liveness from a daemon thread until `close`.

    Args:
        liveness: The loop's notes.
        on_change: Called when the loop stalls, and when it moves again.
        clock: Monotonic seconds.

    Attributes:
        stalled_s: For how long the loop has been stalled, as of the last check; 0 while it moves.
    """

    def __init__(
        self,
        liveness: Liveness,
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._liveness = liveness
        self._on_change = on_change
        self._clock = clock
        self.stalled_s = 0.0
        self._checked_at = self._awake_from = clock()
        # Seconds until the loop counts as stalled, as of the last check.
        self._left_s = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread that checks the loop, just before the loop runs."""
        self._checked_at = self._awake_from = self._clock()
        self._thread.start()

    def close(self) -> None:
        """Stop the thread that checks the loop, after the loop has ended. Idempotent."""
        self._over.set()
        self._thread.join(_JOIN_S)

    def check(self) -> None:
        """Check once whether the loop has stalled, and set `stalled_s`; call `on_change` on a change."""
        now = self._clock()
        if now - self._checked_at > _SUSPENDED_S:
            self._awake_from = now
        self._checked_at = now
        still_s, patience_s = self._liveness.still(now, self._awake_from)
        self._left_s = patience_s - still_s
        before, self.stalled_s = self.stalled_s, still_s if still_s >= patience_s else 0.0
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
            self.check()
            pause_s = min(max(_MIN_PAUSE_S, self._left_s), _MAX_PAUSE_S)
