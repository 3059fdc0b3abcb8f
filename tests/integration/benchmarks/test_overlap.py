"""The document of `python -m benchmarks.overlap`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.overlap import __main__ as command
from benchmarks.overlap import run as overlap
from eaas_cli.local.fork_server import ForkServer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def test_the_document(
    checkpoint: Callable[..., Path], fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command, in this process."""
    torch.set_num_threads(1)
    monkeypatch.setattr(command, "end_on_sigterm", lambda: None)
    forked = partial(overlap.bench_overlap, fork_server=fork_server)
    monkeypatch.setattr(overlap, "bench_overlap", forked)
    done = CliRunner().invoke(
        command.app,
        ["--model", str(checkpoint("qwen3_moe")), "--json",
         "--latency", "0,3000", "--sequences", "2,6", "--steps", "8", "--rounds", "1"],
        catch_exceptions=False,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    places = [(row["added_latency_us"], row["sequences"]) for row in document["rows"]]
    assert places == [(0, 2), (0, 6), (3000, 2), (3000, 6)]
    for row in document["rows"]:
        # Three layers, each of which waits for its experts.
        assert row["step_ms"]["off"] > 3 * row["added_latency_us"] / 1e3
        assert row["ratio"]["on"] > 0
        assert 0 <= row["overlapped"] <= 1


@pytest.mark.parametrize("option", ["--latency=x", "--latency=-1", "--sequences=0"])
def test_a_wrong_option_is_one_line(option: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.overlap", option],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert option.split("=")[0] in done.stderr
    assert "Traceback" not in done.stderr
