"""Traces are read, or refused with the number of the wrong line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from eaas.errors import TrafficError
from simulator.autoscaling import traffic
from simulator.autoscaling.traffic import read_arrivals, read_traffic

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:46.6805900,7,0
"""
MOONCAKE = """{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}
{"timestamp": 0, "input_length": 7322, "output_length": 490, "hash_ids": []}
{"timestamp": 3052, "input_length": 1, "output_length": 1}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace"


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_azure(path: Path, end: str) -> None:
    # The published files have either end of line, and none after the last one.
    path.write_bytes(AZURE.rstrip("\n").replace("\n", end).encode())
    trace = read_traffic(path)
    assert (trace.name, trace.requests, trace.span_s) == ("trace", 3, 60.0)
    np.testing.assert_allclose(trace.arrival_s_R, [0, 4.314579, 60], atol=1e-5)
    assert trace.prompt_R.tolist() == [374, 396, 7]
    assert trace.output_R.tolist() == [44, 109, 0]


def test_mooncake(path: Path) -> None:
    path.write_text(MOONCAKE)
    trace = read_traffic(path)
    assert trace.arrival_s_R.tolist() == [0.0, 0.0, 3.052]
    assert trace.prompt_R.tolist() == [6758, 7322, 1]
    assert trace.output_R.tolist() == [500, 490, 1]


def test_summer_time_is_no_hole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    header = AZURE.splitlines()[0]
    path.write_text(f"{header}\n2023-03-26 01:59:00,1,1\n2023-03-26 03:01:00,1,1\n")
    assert read_traffic(path).span_s == 3720
    path.write_text(f"{header}\n2024-05-10 00:00:00.5+00:00,1,1\n2024-05-10 00:00:01.5+00:00,1,1\n")
    assert read_traffic(path).span_s == 1


def line(text: str, number: int, instead: str) -> str:
    lines = text.splitlines()
    lines[number - 1] = instead
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is empty"),
        (AZURE.splitlines()[0], "0 requests"),
        (line(AZURE, 1, "when,in,out"), "line 1: columns when,in,out; they are to be TIMESTAMP,"),
        (line(AZURE, 3, ""), "line 3: '' is not TIMESTAMP,"),
        (line(AZURE, 3, "2023-11-16 18:15:50,,109"), "line 3: '2023-11-16 18:15:50,,109' is not"),
        (line(AZURE, 3, "2023-11-16 18:15:50,3"), "line 3: '2023-11-16 18:15:50,3' is not"),
        (line(AZURE, 3, "2023-11-16 18:15:50,3,x"), "line 3: invalid literal for int()"),
        (line(AZURE, 3, "yesterday,3,4"), "line 3: Invalid isoformat string: 'yesterday'"),
        (line(AZURE, 3, "2023-11-16 18:15:50,3,-4"), "line 3: -4 tokens"),
        (line(AZURE, 3, "2023-11-16 18:15:40,3,4"), "line 3: it is earlier than the line before"),
        (line(MOONCAKE, 2, ""), "line 2: no JSON"),
        (line(MOONCAKE, 2, "[0, 1, 2]"), "line 2: no JSON object"),
        (line(MOONCAKE, 2, '{"timestamp": 0}'), "line 2: input_length is null, not a number"),
        (
            line(MOONCAKE, 2, json.dumps(dict.fromkeys(traffic._MOONCAKE, True))),
            "line 2: timestamp is true, not a number",
        ),
        (
            line(MOONCAKE, 2, json.dumps(dict.fromkeys(traffic._MOONCAKE, float("nan")))),
            "line 2: timestamp is NaN, not a number",
        ),
        ("# A title\n\nand text", "line 1: columns # A title;"),
    ],
)
def test_a_wrong_line_is_named(path: Path, text: str, said: str) -> None:
    path.write_text(text)
    with pytest.raises(TrafficError) as caught:
        read_traffic(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert said in message
    assert "\n" not in message


def test_no_file_and_no_text(path: Path) -> None:
    with pytest.raises(TrafficError, match="No such file or directory; give a trace"):
        read_traffic(path)
    path.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(TrafficError, match="it is no text"):
        read_traffic(path)


def test_a_long_trace_says_how_far_it_is(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "_LINES", 2)
    path.write_text(AZURE)
    told: list[int] = []
    read_traffic(path, told.append)
    assert told == [3]


def test_arrivals_alone(path: Path) -> None:
    path.write_text(MOONCAKE)
    assert read_arrivals(path) == [0.0, 0.0, 3.052]
    path.write_text("".join(MOONCAKE.splitlines(keepends=True)[:2]))
    with pytest.raises(TrafficError, match="2 requests, all at one moment"):
        read_arrivals(path)
