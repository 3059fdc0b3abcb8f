"""Replays an attention client's recorded request queue offline, with the same or another strategy."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from attention_client.scheduler.queue import Choice, RequestQueue
from attention_client.scheduler.recording import QueueSettings, read_recording
from attention_client.scheduler.strategies import Loads, strategy
from eaas.errors import ConfigError

__all__ = ["Replay", "replay"]


@dataclass
class Replay:
    """Recorded and replayed choices of batches.

    Attributes:
        settings: Settings of the replayed queue.
        recorded: The tickets of each recorded choice.
        choices: Choices of the replay.
        requests: Number of requests.
        seconds: Time from the first line to the last, as recorded.
        pars: Load of a choice's hottest expert over the mean (peak to average), for each choice with a load.
    """

    settings: QueueSettings
    recorded: list[list[int]] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    requests: int = 0
    seconds: float = 0.0
    pars: list[float] = field(default_factory=list)

    @property
    def same(self) -> int:
        """Number of replayed choices with the recorded requests in the same order, to check a replay."""
        pairs = zip(self.recorded, self.choices, strict=True)
        return sum(then == now.tickets for then, now in pairs)

    @property
    def par(self) -> float:
        """Mean of `pars`; 1.0 without."""
        return float(np.mean(self.pars)) if self.pars else 1.0


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
    found, queue = Replay(settings), settings.queue()
    waiting: dict[int, Loads] = {}
    for line, event in enumerate(events, 2):
        try:
            _step(found, queue, waiting, event)
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise ConfigError(f"recording {path}, line {line}: {error!r}") from error
    found.seconds = events[-1]["at"] if events else 0.0
    return found


def _step(
    found: Replay, queue: RequestQueue, waiting: dict[int, Loads], event: dict[str, Any]
) -> None:
    """Apply a recorded event to the queue, such as an added request; a taken batch is chosen anew."""
    if "add" in event:
        found.requests += 1
        waiting[queue.add(event["load"])] = event["load"]
    elif "take" in event:
        before = queue.choice
        tickets = queue.take(event["room"], event["running"])
        if queue.choice is before or queue.choice is None:
            return
        found.recorded.append(event["take"])
        found.choices.append(queue.choice)
        load_E = np.sum([waiting.pop(ticket) for ticket in tickets], axis=0)
        if load_E.any():
            found.pars.append(float(load_E.max() / load_E.mean()))
    elif "remove" in event:
        # Another strategy may have taken the request before it left.
        if event["remove"] in waiting:
            del waiting[event["remove"]]
            queue.remove(event["remove"])
    elif "use" in event:
        queue.use(strategy(event["use"]))
