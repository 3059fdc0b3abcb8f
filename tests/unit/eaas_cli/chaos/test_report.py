"""What a run leaves to read: the document, the command that repeats it, the history."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eaas.errors import ConfigError
from eaas_cli.bench.load import Asked
from eaas_cli.bench.stream import Answer
from eaas_cli.chaos.history import Census, History, Incident, Settings
from eaas_cli.chaos.report import document_of, print_report, repeat_command, write_history
from eaas_cli.commands import app

SETTINGS = Settings(3, 90.0, ("kill", "monitor"), 5, 2, "grpc", 2.5, 16, "/models/my demo")
RIGHT = Answer(10.0, 12.0, "a b", 2, (10.5, 12.0))
KILL = Incident("kill", "expert-server-1", 11.0, 11.5, 12.25)
HELD = {"monitor": Census(1, 3 << 20, 20, 0)}
HISTORY = History(
    2,
    (Asked(0, 10.0, RIGHT), Asked(0, 10.5, None), Asked(0, 11.0, replace(RIGHT, text="x"))),
    ("a b",),
    (KILL, replace(KILL, whole_s=math.inf)),
    HELD,
    HELD,
    (),
)


def test_the_document_counts_answers_and_times(capsys: pytest.CaptureFixture[str]) -> None:
    document = document_of(SETTINGS, {"memory": "needs root"}, HISTORY, ["request 1: no end"])
    assert json.loads(json.dumps(document)) == document
    assert document["requests"]["asked"] == 3
    assert document["requests"]["right"] == 1
    assert document["requests"]["worst_stall_ms"] == 1500.0
    first, second = document["incidents"]
    assert (first["lasted_s"], first["recovery_s"]) == (0.5, 0.75)
    assert second["recovery_s"] is None
    assert document["skipped"] == {"memory": "needs root"}
    assert document["resources"]["monitor"]["resident_mib"] == [3.0, 3.0]
    print_report(document)
    told = capsys.readouterr().out
    for line in ("VIOLATION: request 1: no end", "3 requests, 1 right", "monitor 3.0, 3.0"):
        assert line in told


def test_the_repeat_command_is_valid() -> None:
    words = shlex.split(repeat_command(SETTINGS))
    assert words[:3] == ["eaas", "chaos", "run"]
    assert words[words.index("--minutes") + 1] == "1.5"
    assert words[words.index("--model") + 1] == "/models/my demo"
    # It gets as far as to look for the checkpoint's fault names: they are refused only if unknown.
    words[words.index("--faults") + 1] = "kill,nonsense"
    with pytest.raises(ConfigError, match="--faults nonsense: give one of kill, hang"):
        CliRunner().invoke(app, words[1:], catch_exceptions=False)


def test_the_history_file_has_a_line_per_request_and_fault(tmp_path: Path) -> None:
    write_history(HISTORY, tmp_path / "h.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "h.jsonl").read_text().splitlines()]
    assert len(lines) == 5
    assert lines[0]["text"] == "a b"
    assert (lines[0]["sent_s"], lines[0]["ended_s"]) == (0.0, 2.0)
    assert lines[1]["error"] == "no end"
    assert (lines[3]["kind"], lines[3]["began_s"], lines[4]["whole_s"]) == ("kill", 1.0, None)
    with pytest.raises(ConfigError, match=r"--history .*give another file"):
        write_history(HISTORY, tmp_path / "none" / "h.jsonl")
