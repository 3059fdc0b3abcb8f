"""`python -m benchmarks.validate`: a small run. Whether it is within 10 % depends on the machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.validate import run as validate
from benchmarks.validate.__main__ import app
from eaas_cli.local.fork_server import ForkServer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def test_live_and_simulated_figures(
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    fork_server: ForkServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(validate, "validate", partial(validate.validate, fork_server=fork_server))
    trace = tmp_path / "trace.jsonl"
    line = '{{"timestamp": {}, "input_length": 1, "output_length": 1}}\n'
    trace.write_text("".join(line.format(n * n) for n in range(40)))
    done = CliRunner().invoke(
        app,
        [
            *("--model", str(checkpoint()), "--trace", str(trace)),
            *(
                "--rounds",
                "2",
                "--requests",
                "16",
                "--max-tokens",
                "6",
                "--prompt-tokens",
                "20",
                "--load",
                "2",
            ),
            *("--batch-size", "2", "--window-size", "4", "--servers", "1", "--json"),
        ],
    )
    assert done.stdout, done.output
    document = json.loads(done.stdout)
    assert done.exit_code == (0 if document["within"] else 1)
    assert [row["strategy"] for row in document["strategies"]] == ["fcfs", "cost_bounded"]
    for row in document["strategies"]:
        assert len(row["rounds"]) == 2
        for each in row["rounds"]:
            assert each["choices"] > 3
            assert each["engine"]["fixed_ms"] + each["engine"]["row_ms"] > 0
        for key, error in row["error"].items():
            simulated, live = (
                sum(each[kind][key] for each in row["rounds"]) for kind in ("simulated", "live")
            )
            assert error == pytest.approx(simulated / live - 1, abs=1e-3)
            low, high = row["error_ci95"][key]
            assert low <= error <= high
    errors = [abs(error) for row in document["strategies"] for error in row["error"].values()]
    assert document["within"] == (max(errors) <= 0.1)
