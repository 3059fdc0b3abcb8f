"""Replays an attention client's recorded request queue offline, with the same or another strategy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from attention_client.scheduler.queue import Choice
from attention_client.scheduler.recording import QueueSettings, read_recording
from attention_client.scheduler.strategies import Loads, strategy
from eaas.errors import ConfigError

__all__ = ["Replay", "replay"]


@dataclass(frozen=True)
class Replay:
    """Recorded and replayed choices of batches.

    Attributes:
        settings: Settings of the replayed queue.
        recorded: The tickets of each recorded choice.
        choices: Choices of the replay.
        seconds: Time from the first line to the last, as recorded.
        par: Load of a choice's hottest expert over the mean (peak to average), mean over the choices.
    """

    settings: QueueSettings
    recorded: list[list[int]]
    choices: list[Choice]
    requests: int
    seconds: float
    par: float

    @property
    def same(self) -> int:
        """Number of replayed choices with the recorded requests in the same order, to check a replay."""
        pairs = zip(self.recorded, self.choices, strict=True)
        return sum(then == now.tickets for then, now in pairs)


def replay(path: Path, other: str | None = None) -> Replay:
    """Run a recording through the live `RequestQueue` again, for `python -m benchmarks.caps replay`.

    Args:
        path: File with the recording.
        other: Replaces the recorded strategy; the queue then holds other requests at each time.

    Raises:
        ConfigError: The file is no recording or has an impossible line, or the strategy is unknown.
    """
    settings, events = read_recording(path)
    if other is not None:
        settings = replace(settings, strategy=other)
    run = _Run(settings)
    for line, event in enumerate(events, 2):
        try:
            run.step(event)
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise ConfigError(f"recording {path}, line {line}: {error!r}") from error
    return Replay(
        settings,
        run.recorded,
        run.choices,
        sum("add" in event for event in events),
        events[-1]["at"] if events else 0.0,
        float(np.mean(run.pars)) if run.pars else 1.0,
    )


class _Run:
    """The queue of a replay, with the choices made so far."""

    def __init__(self, settings: QueueSettings) -> None:
        self._queue = settings.queue()
        self._waiting: dict[int, Loads] = {}
        self.recorded: list[list[int]] = []
        self.choices: list[Choice] = []
        self.pars: list[float] = []

    def step(self, event: dict[str, Any]) -> None:
        """Apply a recorded event to the queue, such as an added request; a taken batch is chosen anew."""
        if "add" in event:
            self._waiting[self._queue.add(event["load"])] = event["load"]
        elif "take" in event:
            self._take(event)
        elif "remove" in event:
            # Another strategy may have taken the request before it left.
            if event["remove"] in self._waiting:
                del self._waiting[event["remove"]]
                self._queue.remove(event["remove"])
        elif "use" in event:
            self._queue.use(strategy(event["use"]))

    def _take(self, event: dict[str, Any]) -> None:
        before = self._queue.choice
        tickets = self._queue.take(event["room"], event["running"])
        if self._queue.choice is before or self._queue.choice is None:
            return
        self.recorded.append(event["take"])
        self.choices.append(self._queue.choice)
        load_E = np.sum([self._waiting.pop(ticket) for ticket in tickets], axis=0)
        if load_E.any():
            self.pars.append(float(load_E.max() / load_E.mean()))
