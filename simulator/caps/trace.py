"""When requests came, from files of others. Nothing else of them is used: none carries expert ids.

Read are Azure's LLM inference traces (CSV with a column TIMESTAMP) and Mooncake's (JSON lines with
`timestamp`, in milliseconds).
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from eaas.errors import ConfigError

__all__ = ["read_times"]

_COLUMN = "TIMESTAMP"
_KEY = "timestamp"


def read_times(path: Path) -> list[float]:
    """Seconds from the first request, not falling.

    Raises:
        ConfigError: The file cannot be read, a line has no time or one that is before that of the line
            before, or all requests came at once. The message names file and line.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            times = list(
                _lines(path, _azure(path, file) if path.suffix == ".csv" else _mooncake(path, file))
            )
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"trace {path}: {error}") from error
    if len(times) < 2 or times[-1] == times[0]:
        raise ConfigError(
            f"trace {path}: {len(times)} requests, all at one moment: a rate needs two"
        )
    return [time - times[0] for time in times]


def _lines(path: Path, found: Iterator[tuple[int, float]]) -> Iterator[float]:
    last = -math.inf
    for number, time_s in found:
        if time_s < last:
            raise ConfigError(
                f"trace {path}, line {number}: {last - time_s:g} s before the line above: sort it by time"
            )
        last = time_s
        yield time_s


def _azure(path: Path, file: Iterator[str]) -> Iterator[tuple[int, float]]:
    rows = csv.DictReader(file)
    if _COLUMN not in (rows.fieldnames or ()):
        raise ConfigError(f"trace {path}, line 1: no column {_COLUMN}")
    start: datetime | None = None
    for row in rows:
        text = row[_COLUMN] or ""
        # Seven digits of a second; datetime takes six.
        whole, _, fraction = text.partition(".")
        try:
            moment = datetime.fromisoformat(whole)
            part_s = float(f"0.{fraction or 0}")
        except ValueError:
            raise ConfigError(
                f"trace {path}, line {rows.line_num}: {_COLUMN} {text!r} is no time"
            ) from None
        if None in row.values() or "" in row.values():
            empty = next(name for name, value in row.items() if not value)
            raise ConfigError(f"trace {path}, line {rows.line_num}: {empty} is missing")
        start = start or moment
        yield rows.line_num, (moment - start).total_seconds() + part_s


def _mooncake(path: Path, file: Iterator[str]) -> Iterator[tuple[int, float]]:
    for number, line in enumerate(file, 1):
        try:
            entry = json.loads(line)
            time_ms = float(entry[_KEY])
        except (ValueError, TypeError, KeyError):
            raise ConfigError(
                f"trace {path}, line {number}: no JSON object with a number {_KEY!r}"
            ) from None
        if not math.isfinite(time_ms):
            raise ConfigError(f"trace {path}, line {number}: {_KEY} {time_ms} is no time")
        yield number, time_ms / 1e3
