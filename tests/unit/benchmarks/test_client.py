"""aiperf: its command line, its output, and disagreements of token counts."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.client import Asked, app, command_line, disagreements, read_row
from eaas.errors import ConfigError, EaasError

ASKED = Asked(requests=2, concurrency=1, prompt_tokens=64, max_tokens=48)
STOPPED = dataclasses.replace(ASKED, min_tokens=24, stop="e", server_counts=True)


def entry(prompt: int = 64, output: int = 48, **change: int) -> dict[str, Any]:
    """A line of profile_export.jsonl, in aiperf 0.13's form."""
    counts = {
        "input_sequence_length": prompt,
        "output_sequence_length": output,
        "usage_prompt_tokens": prompt,
        "usage_completion_tokens": output,
    } | change
    metrics: dict[str, Any] = {
        name: {"value": value, "unit": "tokens"} for name, value in counts.items()
    }
    metrics["inter_chunk_latency"] = {"value": [72.8, 81.2], "unit": "ms"}
    return {"metadata": {"session_num": 0}, "metrics": metrics, "error": None}


REFUSED = {
    "metadata": {},
    "metrics": {"error_isl": {"value": 64, "unit": "tokens"}},
    "error": {"code": 400, "type": "Bad Request", "message": "no"},
}


def write(out: Path, entries: list[dict[str, Any]]) -> Path:
    milliseconds = {"unit": "ms", "avg": 2.0, "p50": 1.5, "p99": 9.0}
    summary = {
        "output_token_throughput": {"unit": "tokens/sec", "avg": 84.4},
        "time_to_first_token": milliseconds,
        "inter_token_latency": milliseconds,
    }
    (out / "profile_export.jsonl").write_text("".join(json.dumps(e) + "\n" for e in entries))
    (out / "profile_export_aiperf.json").write_text(json.dumps(summary))
    return out


def test_the_command_line() -> None:
    words = command_line(Path("a"), "http://h:1", Path("/models/demo"), STOPPED, Path("/out"))
    told = dict(itertools.pairwise(words))
    assert words[:2] == ["a", "profile"]
    assert (told["--model"], told["--tokenizer"]) == ("demo", "/models/demo")
    assert (told["--isl"], told["--osl"], told["--request-count"]) == ("64", "48", "2")
    extra = {"ignore_eos": True, "min_tokens": 24, "stop": "e"}
    assert json.loads(told["--extra-inputs"]) == extra
    assert {"--streaming", "--use-server-token-count", "--per-chunk-usage"} <= set(words)
    plain = command_line(Path("a"), "http://h:1", Path("/models/demo"), ASKED, Path("/out"))
    assert "--use-server-token-count" not in plain
    assert json.dumps({"ignore_eos": True}) in plain


def test_a_correct_run_has_no_disagreement(tmp_path: Path) -> None:
    found = read_row(ASKED, write(tmp_path, [entry(), entry(60)]))
    assert (found["answered"], found["prompts_differ"], found["outputs_differ"]) == (2, 0, 0)
    assert found["figures"]["time_to_first_token"] == {"p50": 1.5, "p99": 9.0}
    assert disagreements(found) == []
    # An answer may end at its stop string once it has its tokens.
    found = read_row(STOPPED, write(tmp_path, [entry(output=25), entry(output=30)]))
    assert disagreements(found) == []


@pytest.mark.parametrize(
    ("asked", "second", "told"),
    [
        (ASKED, REFUSED, "1 requests failed, the first with 400 Bad Request: no"),
        (ASKED, entry(usage_prompt_tokens=65), "the lengths of 1 prompts differ"),
        (STOPPED, entry(output_sequence_length=47), "the lengths of 1 outputs differ"),
        (ASKED, entry(output=47), "answers of 47 to 48 tokens, although ignore_eos asks for 48"),
        (ASKED, None, "1 of 2 requests are in the records"),
        (STOPPED, entry(output=23), "an answer of 23 tokens, under min_tokens"),
    ],
)
def test_a_disagreement_is_named(tmp_path, asked, second, told) -> None:
    entries = [entry()] + ([second] if second else [])
    (wrong,) = disagreements(read_row(asked, write(tmp_path, entries)))
    assert wrong.startswith(told)


@pytest.mark.parametrize("lines", ["", "[]\n", "{}\n", "no json\n"])
def test_another_version_of_aiperf_is_named(tmp_path: Path, lines: str) -> None:
    (tmp_path / "profile_export.jsonl").write_text(lines)
    if lines:
        write(tmp_path, [])
        (tmp_path / "profile_export.jsonl").write_text(lines)
    with pytest.raises(EaasError, match=r"not the output of aiperf 0\.13"):
        read_row(ASKED, tmp_path)


def test_runs_of_aiperf_become_one_document(tmp_path: Path) -> None:
    """A stand-in for the program, which leaves a run's output where it is told to."""
    made = tmp_path / "made"
    made.mkdir()
    write(made, [entry(), entry(60)])
    program, demo = tmp_path / "aiperf", tmp_path / "demo"
    demo.mkdir()
    program.write_text(
        f'#!/bin/sh\nwhile [ "$1" != --artifact-dir ]; do shift; done\ncp -r {made} "$2"\n'
    )
    program.chmod(0o755)
    words = ["--model", str(demo), "--aiperf", str(program), "--endpoint", "http://127.0.0.1:1"]
    words += ["--requests", "2", "--rounds", "2", "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["wrong"] == []
    assert [run["answered"] for run in document["runs"]] == [2, 2, 2]
    assert [run["asked"]["seed"] for run in document["runs"]] == [1, 2, 1]
    assert document["runs"][0]["figures"]["output_token_throughput"] == {"avg": 84.4}


@pytest.mark.parametrize(
    ("script", "told"), [(None, "does not exist"), ("echo oh; exit 3", "status 3:\noh")]
)
def test_an_aiperf_that_fails(tmp_path, monkeypatch, script, told) -> None:
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "aiperf"
    if script:
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    demo = tmp_path / "demo"
    demo.mkdir()
    words = ["--model", str(demo), "--aiperf", program.name, "--endpoint", "http://127.0.0.1:1"]
    error = CliRunner().invoke(app, words).exception
    assert isinstance(error, ConfigError if script is None else EaasError)
    assert told in str(error)
