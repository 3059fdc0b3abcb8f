"""Reads traffic traces for the simulator: arrival times, prompt and output lengths of requests.

Files are JSON lines, or CSV with a header. The fields of the first line tell the format (`_FORMATS`). Other
fields are ignored.

A time is a date or a number. The size of the first number tells whether it counts from 1970, and in which
unit. Else the format tells the unit. Mooncake's fields are also written in seconds: a trace is read so if it
is too dense in milliseconds.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from eaas.errors import TrafficError

__all__ = ["Traffic", "Unit", "read_traffic"]

Unit = Literal["s", "ms", "us", "ns"]

_PER_S: dict[Unit, int] = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


class _Format(NamedTuple):
    """Names of three fields, the unit of times, and a further field that tells the format."""

    arrival: str
    prompt: str
    output: str
    unit: Unit
    mark: str = ""


_FORMATS = {
    "Azure": _Format("TIMESTAMP", "ContextTokens", "GeneratedTokens", "s"),
    "Bailian": _Format("timestamp", "input_length", "output_length", "s", "chat_id"),
    "Mooncake": _Format("timestamp", "input_length", "output_length", "ms"),
    "BurstGPT": _Format("Timestamp", "Request tokens", "Response tokens", "s"),
    "LLMServingSim": _Format("arrival_time_ns", "input_toks", "output_toks", "ns"),
    "LLMServingSim's results": _Format("arrival_time", "input_toks", "output_toks", "s"),
}
_GIVE = (
    "give JSON lines or CSV with the fields of Azure, Bailian, BurstGPT, LLMServingSim or Mooncake"
)
# Times since 1970 in any unit, from 2001 to 2286.
_EPOCH_S = (1e9, 1e10)
# Beyond these, a unit is probably wrong.
_MOST_PER_S, _LEAST_S = 1000.0, 1.0
# Beyond these, a number is wrong.
_LARGEST, _MOST_TOKENS, _MOST_SPAN_S = 1e30, 1 << 31, 366 * 86400.0
# Lines between two calls of `progress`.
_LINES = 20_000

_Number = int | float


@dataclass(frozen=True, eq=False)
class Traffic:
    """R requests in the order of their arrival.

    Attributes:
        name: Name of the trace, for people.
        arrival_s_R: float64; seconds, ascending, the first at 0.
        prompt_R: int64; tokens.
        output_R: int64; tokens.
        span_s: Seconds to simulate; for a trace, the time from the first arrival to the last.
        warning: What makes the unit of the times doubtful, in one line; "": nothing.
    """

    name: str
    arrival_s_R: npt.NDArray[np.float64] = field(repr=False)
    prompt_R: npt.NDArray[np.int64] = field(repr=False)
    output_R: npt.NDArray[np.int64] = field(repr=False)
    span_s: float
    warning: str = ""

    @property
    def requests(self) -> int:
        """Number of requests in the trace (R)."""
        return len(self.arrival_s_R)


def read_traffic(
    path: Path,
    unit: Unit | None = None,
    progress: Callable[[int], None] = lambda line: None,
) -> Traffic:
    """Read a traffic trace, for `eaas simulate autoscale`.

    Args:
        path: A file of one of the formats above.
        unit: The unit of times that are numbers; None: as the module says.
        progress: Called every `_LINES` lines with the number of the last line read.

    Raises:
        TrafficError: The file is missing or of another format, a line is wrong, or all requests arrived at
            one moment; the message names the file and the line.
    """
    at_R: list[_Number] = []
    tokens_R: list[tuple[int, int]] = []
    dates, line = False, 1
    texts = _texts(path)
    try:
        found, parse, begin = _opened(texts[0])
        for line, text in enumerate(texts[begin:], begin + 1):
            record = parse(text)
            at, is_date = _time(found.arrival, record.get(found.arrival))
            if at_R and is_date != dates:
                given = record[found.arrival]
                raise ValueError(f"{found.arrival} is {given!r}, other than in the line before")
            if at_R and at < at_R[-1]:
                raise ValueError("it is earlier than the line before")
            dates = is_date
            at_R.append(at)
            prompt, output = (_tokens(n, record.get(n)) for n in (found.prompt, found.output))
            tokens_R.append((prompt, output))
            if line % _LINES == 0:
                progress(line)
    except ValueError as error:
        raise TrafficError(f"{path}, line {line}: {error}") from error
    if len(at_R) < 2:
        raise TrafficError(f"{path}: {len(at_R)} requests; a trace has two at least")
    # Whole numbers are subtracted before they become floats, which round nanoseconds since 1970.
    passed_R = np.array([at - at_R[0] for at in at_R], dtype=np.float64)
    named = "s" if dates else unit or _unit(found, at_R[0], float(passed_R[-1]), len(at_R))
    span_s = float(passed_R[-1]) / _PER_S[named]
    if not span_s:
        raise TrafficError(
            f"{path}: {len(at_R)} requests, all at one moment; a rate takes two moments"
        )
    if span_s > _MOST_SPAN_S:
        raise TrafficError(
            f"{path}: {span_s / 86400:,.4g} days from the first request to the last: correct "
            f"{found.arrival}, or give its unit with --time-unit"
        )
    prompt_R, output_R = np.array(tokens_R, dtype=np.int64).T
    warning = _doubt(path, found, None if dates else named, unit, len(at_R), span_s)
    return Traffic(path.name, passed_R / _PER_S[named], prompt_R, output_R, span_s, warning)


def _texts(path: Path) -> list[str]:
    """Return a file's lines. Raises TrafficError."""
    try:
        # Only a line feed ends a line: a text in JSON may hold U+2028.
        lines = path.read_text(encoding="utf-8-sig").rstrip().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise TrafficError(f"{path}: {what}; {_GIVE}") from error
    if not lines[0]:
        raise TrafficError(f"{path}: it is empty; {_GIVE}")
    return lines


def _opened(first: str) -> tuple[_Format, Callable[[str], Mapping[str, Any]], int]:
    """Return a file's format, the function that parses a line, and the number of lines to skip."""
    is_json = first.lstrip().startswith("{")
    names = [*_object(first)] if is_json else _cells(first)
    for found in _FORMATS.values():
        if {found.arrival, found.prompt, found.output, found.mark or found.arrival} <= set(names):
            return (found, _object, 0) if is_json else (found, partial(_row, names), 1)
    what = "fields" if is_json else "columns"
    raise ValueError(f"{what} {' '.join(','.join(names).split())[:200]}; {_GIVE}")


def _object(text: str) -> Mapping[str, Any]:
    try:
        document = json.loads(text)
    # Brackets in brackets end in a RecursionError.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON: {error}") from error
    if not isinstance(document, dict):
        raise ValueError("no JSON object")
    return document


def _cells(text: str) -> list[str]:
    try:
        return next(csv.reader([text]), [])
    except csv.Error as error:
        raise ValueError(f"no CSV: {error}") from error


def _row(names: list[str], text: str) -> Mapping[str, Any]:
    cells = _cells(text)
    if len(cells) != len(names):
        raise ValueError(f"{text[:200]!r} is not {','.join(names)}")
    return {name: _parsed(cell) for name, cell in zip(names, cells, strict=True)}


def _parsed(cell: str) -> str | _Number:
    """Return the number that a cell of a CSV holds, or the text."""
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            continue
    return cell


def _time(name: str, value: object) -> tuple[_Number, bool]:
    """Return a time as a number, and whether it was a date; then it is in seconds."""
    if not isinstance(value, str):
        return _number(name, value), False
    try:
        at = datetime.fromisoformat(value)
        # Without a zone assume UTC: only differences count, and UTC has no summer time.
        return at.replace(tzinfo=at.tzinfo or UTC).timestamp(), True
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _tokens(name: str, value: object) -> int:
    number = _number(name, value)
    if number != int(number) or number > _MOST_TOKENS or number < 0:
        raise ValueError(f"{name} is {value!s:.40}, not a number of tokens")
    return int(number)


def _number(name: str, value: object) -> _Number:
    # Python treats True as an int, and its JSON parser accepts NaN as a number.
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise ValueError(f"{name} is {json.dumps(value)[:40]}, not a number")
    if not -_LARGEST < value < _LARGEST:
        raise ValueError(f"{name} is {value!s:.40}, beyond {_LARGEST:g}")
    return value


def _unit(found: _Format, first: _Number, passed: float, requests: int) -> Unit:
    """Tell the unit of times by their size, the format and the span."""
    for unit, per_s in _PER_S.items():
        if _EPOCH_S[0] * per_s <= first < _EPOCH_S[1] * per_s:
            return unit
    if found is _FORMATS["Mooncake"] and _is_odd(requests, passed / 1000):
        return "ms" if _is_odd(requests, passed) else "s"
    return found.unit


def _is_odd(requests: int, span_s: float) -> bool:
    return span_s < _LEAST_S or requests / span_s > _MOST_PER_S


def _doubt(
    path: Path, found: _Format, used: Unit | None, asked: Unit | None, requests: int, span_s: float
) -> str:
    """Return the warning of a trace that was read with the unit `used`; None: its times are dates."""
    if _is_odd(requests, span_s):
        said = f"{path}: {requests} requests in {span_s:.3g} s"
        return said + ("" if used is None else f", read in {used}: --time-unit gives another unit")
    if used is None or asked is not None or used == found.unit:
        return ""
    return (
        f"{path}: {found.arrival} is read in {used}, {requests} requests in {span_s:.4g} s: "
        "--time-unit gives another unit"
    )
