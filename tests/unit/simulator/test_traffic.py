"""Traces are read, or refused with the number of the wrong line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eaas.errors import TrafficError
from simulator.autoscaling.traffic import Unit, read_traffic

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


def test_summer_time_is_no_hole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    header = AZURE.splitlines()[0]
    path.write_text(f"{header}\n2023-03-26 01:59:00,1,1\n2023-03-26 03:01:00,1,1\n")
    assert read_traffic(path).span_s == 3720
    path.write_text(f"{header}\n2024-05-10 00:00:00.5+00:00,1,1\n2024-05-10 00:00:01.5+00:00,1,1\n")
    assert read_traffic(path).span_s == 1


def mooncake(times: list[Any], **more: Any) -> str:
    rows = ({**more, "timestamp": at, "input_length": 3, "output_length": 4} for at in times)
    return "\n".join(map(json.dumps, rows))


def others(fields: tuple[str, str, str], times: list[Any]) -> str:
    return "\n".join(json.dumps(dict(zip(fields, (at, 3, 4), strict=True))) for at in times)


EPOCH_S = 1_700_000_000


@pytest.mark.parametrize(
    ("text", "arrival_s"),
    [
        (mooncake([196, 722, 2771]), [0, 0.526, 2.575]),
        # Bailian's fields.
        (mooncake([0.196, 0.722, 2.771], chat_id=1, parent_chat_id=-1), [0, 0.526, 2.575]),
        # Mooncake's, in seconds: 2,000 requests per second are none.
        (mooncake([i / 2 for i in range(240)]), [i / 2 for i in range(240)]),
        (mooncake([EPOCH_S + i for i in (0, 1, 3)]), [0, 1, 3]),
        (mooncake([EPOCH_S * 1000 + i for i in (0, 1000, 3500)], chat_id=1), [0, 1, 3.5]),
        (mooncake([EPOCH_S * 10**6 + i for i in (0, 1, 3 * 10**6)]), [0, 1e-6, 3]),
        # A nanosecond is below what a float of this size holds.
        (mooncake([EPOCH_S * 10**9 + i for i in (0, 1, 2 * 10**9)]), [0, 1e-9, 2]),
        (mooncake(["2024-05-10 00:00:00+00:00", "2024-05-10 00:00:02+00:00"]), [0, 2]),
        (others(("arrival_time_ns", "input_toks", "output_toks"), [0, 4 * 10**9]), [0, 4]),
        (
            others(("arrival_time", "input_toks", "output_toks"), [EPOCH_S + 0.5, EPOCH_S + 3]),
            [0, 2.5],
        ),
        (
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
            "5,ChatGPT,3,4,7,Conversation log\n45.5,GPT-4,3,4,7,API log\n",
            [0, 40.5],
        ),
    ],
)
def test_the_unit_of_times(path: Path, text: str, arrival_s: list[float]) -> None:
    path.write_text(text)
    found = read_traffic(path)
    assert found.arrival_s_R.tolist() == pytest.approx(arrival_s, abs=1e-12)
    assert found.span_s == pytest.approx(arrival_s[-1], abs=1e-12)
    assert (found.prompt_R[0], found.output_R[0]) == (3, 4)


@pytest.mark.parametrize(("unit", "span_s"), [("s", 2000), ("ms", 2), ("us", 2e-3), ("ns", 2e-6)])
def test_the_unit_that_is_asked_for(path: Path, unit: Unit, span_s: float) -> None:
    path.write_text(mooncake([0, 1000, 2000]))
    assert read_traffic(path, unit).span_s == pytest.approx(span_s)
    # Dates have none.
    path.write_text(AZURE)
    assert read_traffic(path, unit).span_s == 60


@pytest.mark.parametrize(
    ("text", "unit", "said"),
    [
        (MOONCAKE, None, ""),
        (AZURE, None, ""),
        (mooncake([0, 900], chat_id=1), None, ""),
        (mooncake([0.25 * i for i in range(9)]), None, "timestamp is read in s, 9 requests in 2 s"),
        (mooncake([0.25 * i for i in range(9)]), "s", ""),
        (mooncake([EPOCH_S, EPOCH_S + 2]), None, "timestamp is read in s"),
        (mooncake([0, 999]), "ms", "2 requests in 0.999 s, read in ms: --time-unit gives another"),
        (mooncake([i / 1001 for i in range(2002)]), None, "2002 requests in 0.002 s, read in ms"),
        (mooncake([0, 0.5], chat_id=1), None, "2 requests in 0.5 s, read in s: --time-unit"),
        (mooncake(["2024-05-10 00:00:00", "2024-05-10 00:00:00.5"]), None, "2 requests in 0.5 s"),
    ],
)
def test_a_doubtful_unit_is_said(path: Path, text: str, unit: Unit | None, said: str) -> None:
    path.write_text(text)
    warning = read_traffic(path, unit).warning
    assert said in warning
    assert bool(said) == bool(warning)
    assert "\n" not in warning


@pytest.mark.parametrize("end", ["\n", "\n\n", "\r\n", "\n \n"])
def test_ends_of_lines(path: Path, end: str) -> None:
    text = mooncake([0, 2000], type="a\u2028b\x85c")
    path.write_bytes(b"\xef\xbb\xbf" + (text + end).encode())
    assert read_traffic(path).requests == 2
    raw = text.replace("\\u2028", "\u2028").replace("\\u0085", "\x85")
    assert "\u2028" in raw
    path.write_text(raw + end, encoding="utf-8")
    assert read_traffic(path).requests == 2


def line(text: str, number: int, instead: str) -> str:
    lines = text.splitlines()
    lines[number - 1] = instead
    return "\n".join(lines)


def tokens(output: str) -> str:
    return line(MOONCAKE, 2, f'{{"timestamp": 1, "input_length": 2, "output_length": {output}}}')


def at(time: str) -> str:
    return line(MOONCAKE, 2, f'{{"timestamp": {time}, "input_length": 2, "output_length": 3}}')


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is empty"),
        (AZURE.splitlines()[0], "0 requests"),
        (line(AZURE, 1, "when,in,out"), "line 1: columns when,in,out; give JSON lines or CSV"),
        (line(AZURE, 3, ""), "line 3: '' is not TIMESTAMP,"),
        (line(AZURE, 3, "2023-11-16 18:15:50,,109"), 'line 3: ContextTokens is "", not a number'),
        (line(AZURE, 3, "2023-11-16 18:15:50,3"), "line 3: '2023-11-16 18:15:50,3' is not"),
        (line(AZURE, 3, "2023-11-16 18:15:50,3,x"), 'line 3: GeneratedTokens is "x", not a number'),
        (line(AZURE, 3, "yesterday,3,4"), "line 3: TIMESTAMP: Invalid isoformat string"),
        (
            line(AZURE, 3, "2023-11-16 18:15:50,3,-4"),
            "line 3: GeneratedTokens is -4, not a number of",
        ),
        (line(AZURE, 3, "2023-11-16 18:15:40,3,4"), "line 3: it is earlier than the line before"),
        (line(MOONCAKE, 2, ""), "line 2: no JSON"),
        (line(MOONCAKE, 2, "[0, 1, 2]"), "line 2: no JSON object"),
        (line(MOONCAKE, 2, '{"timestamp": 0}'), "line 2: input_length is null, not a number"),
        (at("true"), "line 2: timestamp is true, not a number"),
        (at("NaN"), "line 2: timestamp is NaN, not a number"),
        (at("1e308"), "line 2: timestamp is 1e+308, beyond 1e+30"),
        (at("-Infinity"), "line 2: timestamp is -inf, beyond 1e+30"),
        (at("9" * 400), "line 2: timestamp is 999"),
        (at('"2024-05-10"'), "line 2: timestamp is '2024-05-10', other than in the line before"),
        (line(AZURE, 3, "17,3,4"), "line 3: TIMESTAMP is 17, other than in the line before"),
        (line(AZURE, 2, "9999-12-31 23:59:59-23:59,3,4"), "line 3: it is earlier"),
        (tokens("true"), "line 2: output_length is true, not a number"),
        (tokens("1e308"), "line 2: output_length is 1e+308, beyond 1e+30"),
        (tokens("1e20"), "line 2: output_length is 1e+20, not a number of tokens"),
        (tokens(str(2**63)), "line 2: output_length is 9223372036854775808, not a number of"),
        (tokens("-1"), "line 2: output_length is -1, not a number of tokens"),
        (tokens("1.5"), "line 2: output_length is 1.5, not a number of tokens"),
        (tokens("NaN"), "line 2: output_length is NaN, not a number"),
        (tokens("9" * 5000), "line 2: no JSON"),
        (tokens("[" * 100_000), "line 2: no JSON"),
        (line(AZURE, 3, f"2023-11-16 18:15:50,{'9' * 140_000},4"), "line 3: no CSV"),
        (mooncake([7, 7, 7]), "3 requests, all at one moment"),
        (mooncake([0, 5e-324]), "2 requests, all at one moment"),
        (
            mooncake([0, 1e20]),
            "1.157e+12 days from the first request to the last: correct timestamp",
        ),
        ('{"time\\n\\u2028": 1}', "line 1: fields time; give JSON lines"),
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
    with pytest.raises(TrafficError, match="No such file or directory; give JSON lines"):
        read_traffic(path)
    path.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(TrafficError, match="it is no text in UTF-8"):
        read_traffic(path)
