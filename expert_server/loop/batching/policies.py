"""Policies of an expert server for "does this batch wait for more requests?" (ADR 0008: the default).

A connection is *present* from the admission of its request to the answer, and *silent* after that. No batch
waits for a present connection, so a lone client never waits.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Any, Literal

from expert_server.loop.batching.batcher import Batcher, Policy, Queue, Wait

__all__ = ["AllActive", "BatchCost", "Companion", "Immediate", "Window", "create_batcher"]

# About the last 64 batches count.
_GAIN = 1 / 64
# Least spread of the tokens, relative to their mean, for a slope to count.
_MIN_SPREAD = 0.1
_MAX_MISSES = 8


def create_batcher(
    mode: Literal["immediate", "window", "all"], window_s: float, num_layers: int
) -> Batcher[Any, Any]:
    """Make the loop's batcher at start, by the settings `expert_server.batching` and `batch_window_us`."""
    policy: Policy[Any]
    if mode == "immediate":
        policy = Immediate()
    elif mode == "window":
        policy = Window(window_s, num_layers)
    else:
        policy = AllActive(window_s)
    return Batcher(policy)


class Immediate(Policy[Any]):
    """Never waits: each batch has the requests that are queued now."""


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
        silent_since: When it got its last answer; None while it is present.
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


class _Presence(Policy[Any]):
    """Tracks which connections are present, for `Window` and `AllActive`."""

    def __init__(self) -> None:
        self._companions: dict[Any, Companion] = {}

    def admitted(self, connection: Hashable, layer: int) -> None:
        """Mark the connection as present: no batch waits for it (`Policy.admitted`)."""
        companion = self._companions.get(connection)
        if companion is None:
            companion = self._companions[connection] = Companion()
        companion.wrote(layer)

    def answered(self, connection: Hashable, now: float) -> None:
        """Mark a connection without open requests as silent: a batch may wait for it (`Policy.answered`)."""
        companion = self._companions.get(connection)
        if companion is not None:
            companion.was_answered(now)

    def keep(self, connections: Collection[Hashable]) -> None:
        """Forget all other connections, which are closed (`Policy.keep`)."""
        for gone in self._companions.keys() - set(connections):
            del self._companions[gone]


class Window(_Presence):
    """Waits for more requests if that is likely to save time, and never for long.

    A wait of w seconds delays each of the n waiting requests by w. Each of the i connections that write
    in that time would otherwise need a batch of its own, with its own fixed cost f (a batch reads the weights
    once), so it saves f - w. The wait pays off while

        n w < i (f - w),  that is,  w < f i / (n + i)

    f is learned (`BatchCost`); which connections are in time is learned by trying (`Companion`). Arrival
    times do not show this, because a request written during a batch is seen after it, as most
    requests are on a server where waiting pays off. A connection counts if it is silent and its next request
    is likely to be for this layer. w starts when the server could first have computed the batch, and never
    exceeds the window. No batch waits while another layer has requests.

    Args:
        window_s: Longest wait of a batch.
        num_layers: MoE layers of the model.
    """

    def __init__(self, window_s: float, num_layers: int) -> None:
        super().__init__()
        self._window_s = window_s
        self._num_layers = num_layers
        self._cost = BatchCost()
        # The last batch considered, and the connections it still waits for.
        self._queue: Queue[Any] | None = None
        self._awaited: dict[Any, Companion] = {}

    def admitted(self, connection: Hashable, layer: int) -> None:
        """Mark the connection as present; if a batch waits for it, record if it joins (`Policy.admitted`)."""
        super().admitted(connection, layer)
        companion = self._awaited.pop(connection, None)
        if companion is not None and self._queue is not None:
            companion.tried(came=layer == self._queue.layer)

    def computed(self, tokens: int, seconds: float) -> None:
        """Learn the fixed cost of a batch, which bounds later waits (`Policy.computed`)."""
        self._cost.observe(tokens, seconds)

    def keep(self, connections: Collection[Hashable]) -> None:
        """Forget all other connections, also as ones to wait for (`Policy.keep`)."""
        super().keep(connections)
        for gone in self._awaited.keys() - self._companions.keys():
            del self._awaited[gone]

    def never_waits(self, connections: int) -> bool:
        """Whether there is no connection to wait for (`Policy.never_waits`)."""
        return connections < 2

    def wait(self, queue: Queue[Any], alone: bool, now: float) -> Wait[Any] | None:
        """Return an expected connection to wait for, while that is likely to save time (`Policy.wait`)."""
        if len(self._companions) < 2:
            return None
        # Step 1, once per batch: find the connections expected for this layer.
        if queue is not self._queue:
            self._queue, self._awaited = queue, self._expected(queue.layer)
        # Step 2: as long as that pays off, wait for them one after the other.
        i, n = len(self._awaited), len(queue.requests)
        longest = min(self._window_s, self._cost.fixed_s * i / (n + i))
        if alone and now < queue.held_since + longest:
            return Wait(next(iter(self._awaited)), queue.held_since + longest)
        # Step 3: the connections that have not written by now were waited for in vain.
        if alone and now > queue.held_since:
            for companion in self._awaited.values():
                companion.tried(came=False)
        self._awaited = {}
        return None

    def _expected(self, layer: int) -> dict[Any, Companion]:
        before = (layer - 1) % self._num_layers
        return {
            connection: companion
            for connection, companion in self._companions.items()
            if companion.silent_since is not None
            and companion.layer == before
            and companion.is_worth_a_try()
        }


class AllActive(_Presence):
    """The paper's mode: waits until every active client has written, for any layer.

    Then all requests are computed, layer by layer, without a further wait (a round). A connection is active
    if it lives, has been answered, and has been silent for less than the window since then. So a connection
    that is dead, idle, new or just closed delays the others at most once. No batch waits longer than the
    window, which must exceed a client's pause between two calls.

    Args:
        window_s: Longest wait of a batch, and longest silence of an active connection.
    """

    def __init__(self, window_s: float) -> None:
        super().__init__()
        self._window_s = window_s
        self._round_at = float("-inf")

    def never_waits(self, connections: int) -> bool:
        """Never certain: every active client counts (`Policy.never_waits`)."""
        return False

    def wait(self, queue: Queue[Any], alone: bool, now: float) -> Wait[Any] | None:
        """Return the next active, silent connection to wait for; None: begin a round (`Policy.wait`)."""
        if queue.since > self._round_at:
            for connection, companion in self._companions.items():
                if companion.silent_since is None:
                    continue
                until = min(companion.silent_since, queue.held_since) + self._window_s
                if now < until:
                    return Wait(connection, until)
            self._round_at = now
        return None
