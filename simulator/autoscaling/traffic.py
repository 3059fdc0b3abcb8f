"""Reads traffic traces for the simulator: arrival times, prompt and output lengths of requests.

Two published formats are read. The first line of a file determines its format:

  Azure LLM inference traces (CSV)   TIMESTAMP,ContextTokens,GeneratedTokens
  Mooncake traces (JSON lines)       {"timestamp": ms, "input_length": n, "output_length": n, ...}
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt

from eaas.errors import TrafficError

__all__ = ["Traffic", "read_arrivals", "read_traffic"]

_AZURE = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
_MOONCAKE = ["timestamp", "input_length", "output_length"]
# Lines between two calls of `progress`.
_LINES = 20_000

_Row = tuple[float, int, int]


@dataclass(frozen=True, eq=False)
class Traffic:
    """R requests in the order of their arrival.

    Attributes:
        name: Name of the trace, for people.
        arrival_s_R: float64; seconds, ascending, the first at 0.
        prompt_R: int64; tokens.
        output_R: int64; tokens.
        span_s: Seconds to simulate; for a trace, the time from the first arrival to the last.
    """

    name: str
    arrival_s_R: npt.NDArray[np.float64] = field(repr=False)
    prompt_R: npt.NDArray[np.int64] = field(repr=False)
    output_R: npt.NDArray[np.int64] = field(repr=False)
    span_s: float

    @property
    def requests(self) -> int:
        """Number of requests in the trace (R)."""
        return len(self.arrival_s_R)


def read_traffic(path: Path, progress: Callable[[int], None] = lambda line: None) -> Traffic:
    """Read a traffic trace, for `eaas simulate autoscale`.

    Args:
        path: A CSV or JSON lines file of the formats above.
        progress: Called every `_LINES` lines with the number of the last line read.

    Raises:
        TrafficError: The file is missing or of another format, or a line is wrong; the message names the
            file and the line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else "it is no text"
        raise TrafficError(f"{path}: {what}; give a trace of Azure or Mooncake") from error
    if not lines:
        raise TrafficError(f"{path}: it is empty; give a trace of Azure or Mooncake")
    parse = _mooncake if lines[0].lstrip().startswith("{") else _azure
    rows: list[_Row] = []
    for number, row in enumerate(parse(path, lines), start=1):
        # The first line of an Azure trace is the header.
        line = number + (parse is _azure)
        if min(row[1:]) < 0:
            raise _wrong(path, line, f"{min(row[1:])} tokens")
        if rows and row[0] < rows[-1][0]:
            raise _wrong(path, line, "it is earlier than the line before")
        rows.append(row)
        if number % _LINES == 0:
            progress(line)
    if len(rows) < 2:
        raise TrafficError(f"{path}: {len(rows)} requests; a trace has two at least")
    arrival_s, prompt, output = zip(*rows, strict=True)
    arrival_s_R = np.array(arrival_s) - arrival_s[0]
    return Traffic(
        path.name,
        arrival_s_R,
        np.array(prompt, dtype=np.int64),
        np.array(output, dtype=np.int64),
        float(arrival_s_R[-1]),
    )


def read_arrivals(path: Path) -> list[float]:
    """Read the arrival times of a traffic trace, for simulated batch selection: seconds, the first at 0.

    Raises:
        TrafficError: As `read_traffic`, or all requests arrived at one moment.
    """
    traffic = read_traffic(path)
    if not traffic.span_s:
        raise TrafficError(
            f"{path}: {traffic.requests} requests, all at one moment; a rate takes two moments"
        )
    arrival_s: list[float] = traffic.arrival_s_R.tolist()
    return arrival_s


def _wrong(path: Path, line: int, what: str) -> TrafficError:
    return TrafficError(f"{path}, line {line}: {what}")


def _azure(path: Path, lines: list[str]) -> Iterator[_Row]:
    columns = next(csv.reader(lines[:1]), [])
    if columns != _AZURE:
        raise _wrong(
            path,
            1,
            f"columns {','.join(columns)}; they are to be {','.join(_AZURE)} (or JSON lines)",
        )
    for number, line in enumerate(lines[1:], start=2):
        cells = next(csv.reader([line]), [])
        if len(cells) != len(_AZURE) or not all(cells):
            raise _wrong(path, number, f"{line!r} is not {','.join(_AZURE)}")
        try:
            at = datetime.fromisoformat(cells[0])
            # Without a zone assume UTC: only differences count, and UTC has no summer time.
            yield at.replace(tzinfo=at.tzinfo or UTC).timestamp(), int(cells[1]), int(cells[2])
        except ValueError as error:
            raise _wrong(path, number, str(error)) from error


def _mooncake(path: Path, lines: list[str]) -> Iterator[_Row]:
    for number, line in enumerate(lines, start=1):
        try:
            document = json.loads(line)
        except ValueError as error:
            raise _wrong(path, number, f"no JSON: {error}") from error
        if not isinstance(document, dict):
            raise _wrong(path, number, "no JSON object")
        values = [_number(path, number, key, document.get(key)) for key in _MOONCAKE]
        yield values[0] / 1000, int(values[1]), int(values[2])


def _number(path: Path, line: int, key: str, value: object) -> float:
    # Python treats True as an int, and its JSON parser accepts NaN as a number.
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _wrong(path, line, f"{key} is {json.dumps(value)}, not a number")
    return value
