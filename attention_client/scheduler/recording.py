"""Record the events of a client's request queue as JSON lines, sufficient to replay its choices.

The first line holds the queue's settings:

    {"record": "eaas-queue", "version": 1, "strategy": "cost_bounded", "most_stretch": 0.2, "loads": 16,
     "batch_size": 32, "window_size": 128, "seed": 0, "cost": {...}}

Each other line is an event, at seconds since the first line:

    {"at": 0.5, "add": 7, "load": [0.25, ...]}                 request 7 arrived, with this predicted load
    {"at": 0.6, "take": [5, 7], "room": 2, "running": [...]}   these were chosen; running null: nothing ran
    {"at": 0.7, "remove": 6}                                   request 6 was cancelled
    {"at": 0.8, "observe": 1.5, "choice": 0}                   true cost of the first choice
    {"at": 0.9, "price": {...}}                                another cost model: the placement changed
    {"at": 1.0, "use": "fcfs"}                                 another strategy: the first one failed
    {"at": 1.1, "step": [3, 40], "seconds": 0.02}              time of an engine step with 3 decoding
                                                               requests and 40 prompt tokens
    {"at": 1.1, "probe": 0.0003}                               time of a fixed computation: the machine's pace

A cost model is {"shares_LSE": [[[1.0, ...]]], "fixed_s": 0.0, "load_s": 16.0, "pair_s": 1.0, "steps": 1}
(`ServerCost`). Numbers are written in full precision.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from attention_client.scheduler.cost import CostModel, ServerCost
from attention_client.scheduler.queue import RequestQueue
from attention_client.scheduler.strategies import SelectionStrategy, strategy
from attention_client.scheduler.strategies.cost_bounded import CostBounded
from eaas.errors import ConfigError
from eaas.log import get_logger

__all__ = ["QueueSettings", "Recorder", "read_recording"]

_log = get_logger(__name__)

_RECORD = "eaas-queue"
_VERSION = 1


@dataclass(frozen=True)
class QueueSettings:
    """Settings of a recorded queue, without its cost model.

    Attributes:
        strategy: Name of the strategy.
        most_stretch: See `CostBounded`; other strategies ignore it.
        loads: Length of a load vector (E, or L E).
        batch_size, window_size, seed: See `RequestQueue`.
    """

    strategy: str
    most_stretch: float
    loads: int
    batch_size: int
    window_size: int
    seed: int = 0

    def chosen(self) -> SelectionStrategy:
        """Make a new selection strategy by these settings. Raises ConfigError for an unknown name."""
        if self.strategy == CostBounded.name:
            return CostBounded(self.most_stretch)
        return strategy(self.strategy)

    def queue(self, cost: CostModel, recorder: Recorder | None = None) -> RequestQueue:
        """Make a queue, live (recorded if a recorder is given) or for a replay. Raises ConfigError."""
        queue = RequestQueue(
            self.chosen(),
            self.loads,
            batch_size=self.batch_size,
            window_size=self.window_size,
            cost=cost,
            seed=self.seed,
            note=None if recorder is None else recorder.note,
        )
        if recorder is not None:
            recorder.begin(self, cost)
        return queue


class Recorder:
    """Writes a queue's events to a recording. A write error ends the recording, but serving continues.

    Args:
        file: Output; flushed after each choice, closed by `close`.
        clock: Monotonic seconds.
    """

    def __init__(self, file: TextIO, clock: Callable[[], float]) -> None:
        self._file = file
        self._clock = clock
        self._began_s = clock()
        self._has_failed = False

    def begin(self, settings: QueueSettings, cost: CostModel) -> None:
        """Write the recording's first line, before any event: the queue's settings and its cost model."""
        head = {"record": _RECORD, "version": _VERSION, **asdict(settings), "cost": cost}
        self._do(lambda: self._file.write(json.dumps(head, default=_plain) + "\n"))

    def note(self, **event: Any) -> None:
        """Write one event of the queue. A choice flushes the file, so that it survives a crash."""
        line = {"at": round(self._clock() - self._began_s, 6), **event}
        self._do(lambda: self._file.write(json.dumps(line, default=_plain) + "\n"))
        if "take" in event:
            self._do(self._file.flush)

    def close(self) -> None:
        """End the recording and close its file; no event may follow."""
        self._do(self._file.close)

    def _do(self, what: Callable[[], object]) -> None:
        if self._has_failed:
            return
        try:
            what()
        except OSError as error:
            self._has_failed = True
            _log.error("the recording of the queue ends here: %s", error)
            # `close` may fail as well, because it flushes.
            with contextlib.suppress(OSError):
                self._file.close()


def read_recording(path: Path) -> tuple[QueueSettings, CostModel, list[dict[str, Any]]]:
    """Read a recording for a replay in the simulator: its settings, cost model and events in order.

    In events, prices are cost models and loads are arrays.

    Raises:
        ConfigError: The file cannot be read, or a line is invalid; the message names file and line.
    """
    try:
        # Drop the last, unterminated line: a killed process may leave a partial one.
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"recording {path}: {error}") from error
    found: list[Any] = []
    for number, line in enumerate(lines or [""], 1):
        try:
            document = json.loads(line)
            found.append(_head(document) if not found else _event(document, found[0][0].loads))
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
            raise ConfigError(f"recording {path}, line {number}: {error}") from error
    (settings, cost), *events = found
    return settings, cost, events


def _head(line: dict[str, Any]) -> tuple[QueueSettings, CostModel]:
    if line.pop("record") != _RECORD or line.pop("version") != _VERSION:
        raise ValueError("not a recording of this version")
    cost = _cost(line.pop("cost"))
    return QueueSettings(**line), cost


def _event(line: dict[str, Any], loads: int) -> dict[str, Any]:
    line["at"] = float(line["at"])
    for key in ("load", "running"):
        if line.get(key) is not None:
            line[key] = np.array(line[key], dtype=np.float64)
            if line[key].shape != (loads,):
                raise ValueError(f"{key} has {line[key].size} numbers instead of {loads}")
    if "price" in line:
        line["price"] = _cost(line["price"])
    return line


def _plain(value: object) -> object:
    """Convert an event's array or cost model to plain data for JSON."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if not isinstance(value, ServerCost):
        raise TypeError(f"{type(value).__name__} cannot be recorded")
    return {
        "shares_LSE": value.shares_LSE,
        "fixed_s": value.fixed_s,
        "load_s": value.load_s,
        "pair_s": value.pair_s,
        "steps": value.steps,
    }


def _cost(document: dict[str, Any]) -> CostModel:
    shares_LSE = np.array(document.pop("shares_LSE"), dtype=np.float64)
    return ServerCost(shares_LSE, **document)
