"""Files of arrivals, and the line that is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from eaas.errors import ConfigError
from simulator.caps.trace import read_times

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
FIRST = "2023-11-16 18:17:03.9799600,4808,10\n"


def test_azure(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(HEAD + FIRST + "2023-11-16 18:17:04.0319600,31,8\n2023-11-17 00:00:00,1,1\n")
    assert read_times(path) == pytest.approx([0, 0.052, 20576.02004], abs=1e-6)


def test_mooncake(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 1000, "hash_ids": []}\n{"timestamp": 1500.5}\n')
    assert read_times(path) == pytest.approx([0, 0.5005])


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("a.csv", "TIME,ContextTokens\n1,2\n", "line 1: no column TIMESTAMP"),
        ("a.csv", "", "line 1: no column TIMESTAMP"),
        ("a.csv", HEAD + FIRST + ",3180,8\n", "line 3: TIMESTAMP '' is no time"),
        ("a.csv", HEAD + FIRST + "yesterday,3180,8\n", "line 3: TIMESTAMP 'yesterday' is no time"),
        ("a.csv", HEAD + FIRST + "2023-11-16 18:17:05.x,3180,8\n", "line 3"),
        ("a.csv", HEAD + FIRST + "2023-11-16 18:17:05.0,,8\n", "line 3: ContextTokens is missing"),
        ("a.csv", HEAD + FIRST + "2023-11-16 18:17:05.0,7\n", "line 3: GeneratedTokens is missing"),
        (
            "a.csv",
            HEAD + FIRST + "2023-11-16 18:17:02.0,7,1\n",
            "line 3: 1.97996 s before the line",
        ),
        ("a.csv", HEAD + FIRST, "1 requests"),
        ("a.csv", HEAD + FIRST + FIRST, "2 requests, all at one moment"),
        ("a.jsonl", '{"timestamp": 1}\n\n{"timestamp": 2}\n', "line 2: no JSON object"),
        ("a.jsonl", '{"timestamp": 1}\n{"time": 2}\n', "line 2: no JSON object"),
        ("a.jsonl", '{"timestamp": 1}\n{"timestamp": NaN}\n', "line 2: timestamp nan is no time"),
        ("a.jsonl", '{"timestamp": 2}\n{"timestamp": 1}\n', "line 2: 0.001 s before"),
    ],
)
def test_a_hole_is_named_by_its_line(tmp_path: Path, name: str, text: str, named: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_times(path)
    assert str(path) in str(caught.value)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.csv"):
        read_times(tmp_path / "gone.csv")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"bytes\.csv"):
        read_times(tmp_path / "bytes.csv")
