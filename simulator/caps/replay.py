"""A recorded queue, once more: the same history through the same objects, or through another strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attention_client.scheduler.cost import CostModel
from attention_client.scheduler.queue import Choice
from attention_client.scheduler.recording import QueueSettings, read_recording
from attention_client.scheduler.strategies import strategy

__all__ = ["Replay", "replay"]


@dataclass(frozen=True)
class Replay:
    """What was chosen then and now.

    Attributes:
        settings: Of the queue that was replayed.
        recorded: The tickets of each choice, as recorded.
        choices: Those of the replay.
        requests: That came.
        seconds: From the first line to the last, as recorded.
        predicted_s: Sum of the costs of the choices, as the cost models of the time predict them.
    """

    settings: QueueSettings
    recorded: list[list[int]]
    choices: list[Choice]
    requests: int
    seconds: float
    predicted_s: float

    @property
    def same(self) -> int:
        """Choices of the very same requests in the same order."""
        pairs = zip(self.recorded, self.choices, strict=True)
        return sum(then == now.tickets for then, now in pairs)


def replay(path: Path, other: str | None = None) -> Replay:
    """Run a recording through the queue again.

    Args:
        path: Of a recording.
        other: Strategy in place of the recorded one. Then other requests are left at each time.

    Raises:
        ConfigError: It is no recording, or the strategy is unknown.
    """
    settings, cost, events = read_recording(path)
    if other is not None:
        settings = replace(settings, strategy=other)
    return _run(settings, cost, events)


def _run(settings: QueueSettings, cost: CostModel, events: Sequence[dict[str, Any]]) -> Replay:
    queue = settings.queue(cost)
    recorded: list[list[int]] = []
    choices: list[Choice] = []
    waiting: dict[int, Any] = {}
    predicted_s = 0.0
    for event in events:
        if "add" in event:
            waiting[queue.add(event["load"])] = event["load"]
        elif "take" in event:
            before = queue.choice
            tickets = queue.take(event["room"], event["running"])
            if queue.choice is before or queue.choice is None:
                continue
            recorded.append(event["take"])
            choices.append(queue.choice)
            predicted_s += cost.batch_s(sum(waiting.pop(ticket) for ticket in tickets))
        elif "remove" in event:
            # Another strategy may have taken it before it left.
            if event["remove"] in waiting:
                del waiting[event["remove"]]
                queue.remove(event["remove"])
        elif "observe" in event:
            queue.observe(event["observe"], choices[event["choice"]])
        elif "use" in event:
            queue.use(strategy(event["use"]))
        elif "price" in event:
            cost = event["price"]
            queue.price(cost)
    at_s = [event["at"] for event in events] or [0.0]
    return Replay(
        settings, recorded, choices, len([e for e in events if "add" in e]), at_s[-1], predicted_s
    )
