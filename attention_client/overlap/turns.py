"""Two forward passes on one thread, in turns.

A pass gives the turn away where it would wait for its experts, in the middle of the model's own code; hence
greenlets, whose switch takes a microsecond. Threads would need a hand-over of the GIL at each switch, and
each would bring an OpenMP team of its own.
"""

from __future__ import annotations

import contextvars
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import greenlet

__all__ = ["Task", "in_turns", "micro_batch_tokens", "pause"]


class Task(NamedTuple):
    """A forward pass of a micro-batch.

    Attributes:
        run: Does it; its value is the result.
        tokens: Which of the whole batch's tokens, in their flattened order.
    """

    run: Callable[[], Any]
    tokens: slice


class _Turn(greenlet.greenlet):  # type: ignore[misc]
    def __init__(self, task: Task) -> None:
        super().__init__(task.run)
        self.tokens = task.tokens
        # transformers keeps what a forward pass collects in context variables.
        self.gr_context = contextvars.copy_context()


def in_turns(tasks: Sequence[Task]) -> list[Any]:
    """Run tasks, each until it pauses, then the next one, round and round.

    The first task is always a turn ahead, and a given sequence of pauses gives the same order every time.

    Returns:
        Their results.

    Raises:
        BaseException: Whatever one of them raised; the others end with GreenletExit in their `pause`.
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
    """Give the turn away. Does nothing in a forward pass that is alone."""
    turn = greenlet.getcurrent()
    if isinstance(turn, _Turn):
        turn.parent.switch()


def micro_batch_tokens() -> slice | None:
    """Which of the batch's tokens the running forward pass has; None: all of them, it is alone."""
    turn = greenlet.getcurrent()
    return turn.tokens if isinstance(turn, _Turn) else None
