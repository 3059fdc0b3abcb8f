"""Three answers to "is this batch to wait for company?" (ADR 0008 says which is the default, and why).

A connection is *present* while a request of it is admitted and not answered, and *silent* after that. Nobody
waits for one that is present: so a client alone never waits.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Any, Literal

from expert_server.batching.batcher import Batcher, Policy, Queue, Wait
from expert_server.batching.learning import BatchCost, Companion

__all__ = ["AllActive", "Immediate", "Window", "create_batcher"]


def create_batcher(
    mode: Literal["immediate", "window", "all"], window_s: float, num_layers: int
) -> Batcher[Any, Any]:
    """A batcher for the settings `expert_server.batching` and `batch_window_us`."""
    policy: Policy[Any]
    if mode == "immediate":
        policy = Immediate()
    elif mode == "window":
        policy = Window(window_s, num_layers)
    else:
        policy = AllActive(window_s)
    return Batcher(policy)


class Immediate:
    """Computes what is there."""

    def admitted(self, connection: Hashable, layer: int) -> None:
        """See `Policy`."""

    def answered(self, connection: Hashable, now: float) -> None:
        """See `Policy`."""

    def computed(self, tokens: int, seconds: float) -> None:
        """See `Policy`."""

    def keep(self, connections: Collection[Hashable]) -> None:
        """See `Policy`."""

    def wait(self, queue: Queue[Any], alone: bool, now: float) -> None:
        """See `Policy`."""


class _Attendance:
    """What `Window` and `AllActive` have in common: they know who is there, and who was."""

    def __init__(self) -> None:
        self._companions: dict[Any, Companion] = {}

    def admitted(self, connection: Hashable, layer: int) -> None:
        """See `Policy`."""
        companion = self._companions.get(connection)
        if companion is None:
            companion = self._companions[connection] = Companion()
        companion.wrote(layer)

    def answered(self, connection: Hashable, now: float) -> None:
        """See `Policy`."""
        companion = self._companions.get(connection)
        if companion is not None:
            companion.was_answered(now)

    def computed(self, tokens: int, seconds: float) -> None:
        """See `Policy`."""

    def keep(self, connections: Collection[Hashable]) -> None:
        """See `Policy`."""
        for gone in self._companions.keys() - set(connections):
            del self._companions[gone]


class Window(_Attendance):
    """Waits where that is likely to pay, and never for long.

    A wait of w seconds delays each of the n requests that are there by w. Each of the i connections that
    write meanwhile would have been late for this batch, and a batch of its own would have had its own fixed
    cost f (weights are read once for each batch): it saves f - w. So the wait pays while

        n w < i (f - w),  that is,  w < f i / (n + i)

    f is learned (`BatchCost`), and who comes in time is learned by trying (`Companion`). Times of arrival do
    not tell: what is written during a batch is seen when the batch is over, and on a server where waiting
    pays, most requests are. Only a silent connection whose next request is likely to be for this very layer
    counts. w is counted from when the server could have begun, and is never more than the window. There is no
    wait while another layer has requests: that is work to do.

    Args:
        window_s: Longest wait of a batch.
        num_layers: MoE layers of the model.
    """

    def __init__(self, window_s: float, num_layers: int) -> None:
        super().__init__()
        self._window_s = window_s
        self._num_layers = num_layers
        self._cost = BatchCost()
        # The batch that was looked at last, and who is still awaited for it.
        self._queue: Queue[Any] | None = None
        self._awaited: dict[Any, Companion] = {}

    def admitted(self, connection: Hashable, layer: int) -> None:
        """See `Policy`."""
        super().admitted(connection, layer)
        companion = self._awaited.pop(connection, None)
        if companion is not None and self._queue is not None:
            companion.tried(came=layer == self._queue.layer)

    def computed(self, tokens: int, seconds: float) -> None:
        """See `Policy`."""
        self._cost.observe(tokens, seconds)

    def keep(self, connections: Collection[Hashable]) -> None:
        """See `Policy`."""
        super().keep(connections)
        for gone in self._awaited.keys() - self._companions.keys():
            del self._awaited[gone]

    def wait(self, queue: Queue[Any], alone: bool, now: float) -> Wait[Any] | None:
        """See `Policy`."""
        if len(self._companions) < 2:
            return None
        # Step 1, at the first look: who may come for this layer.
        if queue is not self._queue:
            self._queue, self._awaited = queue, self._expected(queue.layer)
        # Step 2: as long as that pays, wait for them one after the other.
        i, n = len(self._awaited), len(queue.requests)
        longest = min(self._window_s, self._cost.fixed_s * i / (n + i))
        if alone and now < queue.held_since + longest:
            return Wait(next(iter(self._awaited)), queue.held_since + longest)
        # Step 3: who has not come by now was waited for in vain.
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


class AllActive(_Attendance):
    """The paper's mode: waits until every active client has written, for whatever layer.

    Then all that was written is computed, layer by layer, without a further wait (a round). A connection is
    active if it lives, has been answered, and has been silent since then for less than the window. So one
    that is dead, idle or new, or that has just left, holds the others up once at most; and no batch waits
    for longer than the window, which must be longer than a client's pause between two calls.

    Args:
        window_s: Longest wait of a batch, and longest silence of an active connection.
    """

    def __init__(self, window_s: float) -> None:
        super().__init__()
        self._window_s = window_s
        self._round_at = float("-inf")

    def wait(self, queue: Queue[Any], alone: bool, now: float) -> Wait[Any] | None:
        """See `Policy`."""
        if queue.since > self._round_at:
            for connection, companion in self._companions.items():
                if companion.silent_since is None:
                    continue
                until = min(companion.silent_since, queue.held_since) + self._window_s
                if now < until:
                    return Wait(connection, until)
            self._round_at = now
        return None
