"""Run two micro-batches' forward passes in turns on the client's model thread (double-batch overlap).

A pass yields its turn where it would wait for its experts, deep in the model's own code. That needs
greenlets, which switch in a microsecond. Threads would hand over the GIL at each switch, and each would have
its own OpenMP team.
"""

from __future__ import annotations

import contextvars
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import greenlet

__all__ = ["Task", "in_turns", "micro_batch_tokens", "pause"]


class Task(NamedTuple):
    """The forward pass of one micro-batch, to be run in turns with another.

    Attributes:
        run: Runs the pass and returns its result.
        tokens: The micro-batch's tokens in the whole batch's flattened order.
    """

    run: Callable[[], Any]
    tokens: slice


class _Turn(greenlet.greenlet):  # type: ignore[misc]
    def __init__(self, task: Task) -> None:
        super().__init__(task.run)
        self.tokens = task.tokens
        # transformers collects outputs of a forward pass in context variables.
        self.gr_context = contextvars.copy_context()


def in_turns(tasks: Sequence[Task]) -> list[Any]:
    """Run forward passes in round-robin order, each until its next `pause`. The order is deterministic.

    Returns:
        The results, in the order of the tasks.

    Raises:
        BaseException: The exception of a task; the other tasks end with GreenletExit in their `pause`.
    """
    results: list[Any] = [None] * len(tasks)
    waiting = deque((i, _Turn(task)) for i, task in enumerate(tasks))
    try:
        while waiting:
            i, turn = waiting.popleft()
            value = turn.switch()
            if turn.dead:
                results[i] = value
            else:
                waiting.append((i, turn))
    finally:
        for _, turn in waiting:
            turn.throw()
    return results


def pause() -> None:
    """Let the other micro-batch compute while this one's experts do. Does nothing outside `in_turns`."""
    turn = greenlet.getcurrent()
    if isinstance(turn, _Turn):
        turn.parent.switch()


def micro_batch_tokens() -> slice | None:
    """Return which tokens of the batch the running micro-batch holds; None (all) outside `in_turns`."""
    turn = greenlet.getcurrent()
    return turn.tokens if isinstance(turn, _Turn) else None
