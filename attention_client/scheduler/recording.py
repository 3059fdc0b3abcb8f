"""Record the events of a client's request queue as JSON lines, sufficient to replay its choices.

The first line holds the queue's settings:

    {"record": "eaas-queue", "version": 2, "strategy": "greedy_variance", "loads": 16,
     "batch_size": 32, "window_size": 128, "seed": 0}

Each other line is an event, at seconds since the first line:

    {"at": 0.5, "add": 7, "load": [0.25, ...]}                 request 7 arrived, with this predicted load
    {"at": 0.6, "take": [5, 7], "room": 2, "running": [...]}   these were chosen; running null: nothing ran
    {"at": 0.7, "remove": 6}                                   request 6 was cancelled
    {"at": 1.0, "use": "fcfs"}                                 another strategy: the first one failed
    {"at": 1.1, "step": [3, 40], "seconds": 0.02}              time of an engine step with 3 decoding
                                                               requests and 40 prompt tokens
    {"at": 1.1, "probe": 0.0003}                               time of a fixed computation: the machine's pace

Numbers are written in full precision.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from attention_client.scheduler.queue import RequestQueue
from attention_client.scheduler.strategies import strategy
from eaas.errors import ConfigError
from eaas.log import get_logger

__all__ = ["QueueSettings", "Recorder", "read_recording"]

_log = get_logger(__name__)

_RECORD = "eaas-queue"
_VERSION = 2


@dataclass(frozen=True)
class QueueSettings:
    """Settings of a recorded queue.

    Attributes:
        strategy: Name of the strategy.
        loads: Length of a load vector (E, or L E).
        batch_size, window_size, seed: See `RequestQueue`.
    """

    strategy: str
    loads: int
    batch_size: int
    window_size: int
    seed: int = 0

    def queue(self, recorder: Recorder | None = None) -> RequestQueue:
        """Make a queue, live (recorded if a recorder is given) or for a replay. Raises ConfigError."""
        queue = RequestQueue(
            strategy(self.strategy),
            batch_size=self.batch_size,
            window_size=self.window_size,
            seed=self.seed,
            note=None if recorder is None else recorder.note,
        )
        if recorder is not None:
            recorder.begin(self)
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

    def begin(self, settings: QueueSettings) -> None:
        """Write the recording's first line, before any event: the queue's settings."""
        self._write({"record": _RECORD, "version": _VERSION, **asdict(settings)})

    def note(self, **event: Any) -> None:
        """Write one event of the queue. A choice flushes the file, so that it survives a crash."""
        self._write({"at": round(self._clock() - self._began_s, 6), **event})
        if "take" in event:
            self._do(self._file.flush)

    def close(self) -> None:
        """End the recording and close its file; no event may follow."""
        self._do(self._file.close)

    def _write(self, line: dict[str, Any]) -> None:
        self._do(lambda: self._file.write(json.dumps(line, default=np.ndarray.tolist) + "\n"))

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


def read_recording(path: Path) -> tuple[QueueSettings, list[dict[str, Any]]]:
    """Read a recording for a replay in the simulator: its settings and events in order, loads as arrays.

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
            found.append(_event(document, found[0].loads) if found else _head(document))
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
            raise ConfigError(f"recording {path}, line {number}: {error}") from error
    settings, *events = found
    return settings, events


def _head(line: dict[str, Any]) -> QueueSettings:
    if line.pop("record") != _RECORD or line.pop("version") != _VERSION:
        raise ValueError("not a recording of this version")
    return QueueSettings(**line)


def _event(line: dict[str, Any], loads: int) -> dict[str, Any]:
    line["at"] = float(line["at"])
    for key in ("load", "running"):
        if line.get(key) is not None:
            line[key] = np.array(line[key], dtype=np.float64)
            if line[key].shape != (loads,):
                raise ValueError(f"{key} has {line[key].size} numbers instead of {loads}")
    return line
