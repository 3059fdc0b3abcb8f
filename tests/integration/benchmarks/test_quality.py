"""`python -m benchmarks.quality`, with a few formats and windows."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.quality import __main__ as command
from benchmarks.quality import run as quality
from benchmarks.quality.report import print_report
from eaas_cli.local.fork_server import ForkServer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

README = Path(__file__).parents[3] / "README.md"


def test_the_document(
    fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command, in this process: better formats lose less, and a cluster is close to transformers."""
    torch.set_num_threads(1)
    monkeypatch.setattr(command, "end_on_sigterm", lambda: None)
    forked = partial(quality.bench_quality, fork_server=fork_server)
    monkeypatch.setattr(quality, "bench_quality", forked)
    done = CliRunner().invoke(
        command.app,
        ["--text", str(README), "--formats", "int8,mxfp4,gptq-int8,ct-int4-channel,ct-int8",
         "--windows", "4", "--length", "256", "--json"],
        catch_exceptions=False,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    rows = {row["format"]: row for row in document["formats"]}
    assert list(rows) == ["bf16", "int8", "mxfp4", "gptq-int8", "ct-int4-channel"]
    assert "128" in document["left_out"]["ct-int8"]
    assert document["texts"] == {"README.md": 4}
    for row in rows.values():
        assert row["ratio"] == pytest.approx(1, abs=0.003)
        assert row["kernel"]
    for column in ("served", "dequantised"):
        ratios = {name: row[column]["ratio"] for name, row in rows.items()}
        assert ratios["bf16"] == 1
        assert ratios["int8"] == pytest.approx(1, abs=0.005)
        assert ratios["gptq-int8"] == pytest.approx(1, abs=0.005)
        assert 1.005 < ratios["ct-int4-channel"] < 1.5
    capsys.readouterr()
    print_report(document)
    shown = capsys.readouterr().out
    assert "ct-int4-channel" in shown
    assert "left out: ct-int8" in shown


@pytest.mark.parametrize("option", ["--formats=fp7", "--text=gone.txt", "--windows=1"])
def test_a_wrong_option_is_one_line(option: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.quality", option],
        cwd=README.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert option.split("=")[0] in done.stderr
    assert "Traceback" not in done.stderr
