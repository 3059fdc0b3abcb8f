"""Every benchmark runs as `python -m benchmarks.NAME`; a mistake is one line that names the option."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from eaas.errors import EaasError

ROOT = Path(__file__).parents[3]
MODULES = (
    *("caps", "client", "dispatch.__main__", "experts", "failover", "policies", "scale.__main__"),
    "vllm",
)


def run(module: str, *words: str) -> Result:
    return CliRunner().invoke(import_module(f"benchmarks.{module}").app, words)


@pytest.mark.parametrize("module", MODULES)
def test_help_of_every_benchmark(module: str) -> None:
    done = run(module, "--help")
    assert done.exit_code == 0, done.output
    assert "Usage" in done.stdout


def test_a_strategy_is_judged_on_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "".join(
            f'{{"timestamp": {7 * n}, "input_length": 1, "output_length": 1}}\n' for n in range(200)
        )
    )
    words = ("--requests", "100", "--seeds", "1", "--loads", "0.8", "--overloads", "1.5")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.caps", "judge", *words),
            *("--trace", str(trace), "--step-us", "10,400,20", "--json"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [(row["arrivals"], row["load"], row["clustered"]) for row in rows] == [
        *[("bursty", 0.8, True), ("bursty", 1.5, True)],
        *[("poisson", 0.8, False), ("poisson", 1.5, False)],
        *[("trace.jsonl", 0.8, True), ("trace.jsonl", 0.8, False)],
    ]


@pytest.fixture(autouse=True)
def sigterm() -> Iterator[None]:
    """Restore the handler of SIGTERM, which the commands replace."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("caps judge --strategy best", "'best'"),
        ("caps judge --loads 0.5,1.5", "--loads 0.5,1.5"),
        ("caps judge --step-us 1,2", "--step-us 1,2"),
        ("caps judge --trace gone.csv", "gone.csv"),
        ("caps fit gone.json", "gone.json"),
        ("caps replay gone.jsonl", "gone.jsonl"),
        ("dispatch.__main__ --transport pigeon", "--transport pigeon: give one of shm, grpc"),
        ("dispatch.__main__ --hidden 0", "--hidden 0: give whole numbers of at least 1"),
        ("dispatch.__main__ --device gpu", "--device gpu: give one of cpu, cuda"),
        ("scale.__main__ --nodes 5", "--nodes 5"),
    ],
)
def test_a_mistake_is_named(words: str, named: str) -> None:
    result = run(*words.split())
    assert isinstance(result.exception, EaasError)
    assert named in str(result.exception)
    assert "\n" not in str(result.exception)
    assert result.stdout == ""


def test_a_mistake_ends_in_one_line() -> None:
    words = [sys.executable, "-m", "benchmarks.scale", "--nodes", "5"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("eaas: error: --nodes 5")
