"""Every benchmark runs as `python -m benchmarks.NAME`; a mistake is one line that names the option."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks.caps import fit_calls, read_fits
from eaas.errors import ConfigError, EaasError

ROOT = Path(__file__).parents[3]
MODULES = (
    *("caps", "client", "dispatch.__main__", "experts", "failover", "policies", "scale.__main__"),
    *("kt_kernel", "vllm"),
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


EXPERTS, TOP_K = 128, 8


Call = tuple[float, float, float]


def calls(fixed_s: float, load_s: float, pair_s: float, tokens: list[int]) -> list[Call]:
    found = []
    for count in tokens:
        active = EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** count)
        pairs = count * TOP_K
        found.append((active, pairs, fixed_s + max(load_s * active, pair_s * pairs)))
    return found


@given(st.floats(0, 1e-3), st.floats(1e-4, 1e-2), st.floats(1e-6, 1e-4))
def test_exact_times_are_fitted(fixed_s: float, load_s: float, pair_s: float) -> None:
    measured = calls(fixed_s, load_s, pair_s, [1, 2, 8, 64, 512, 1024, 4096, 8192])
    assert fit_calls(measured).worst_error < 1e-6


def test_no_time_is_negative() -> None:
    """Calls that get shorter with more work: no law fits, and none of the times is below zero."""
    found = fit_calls([(1, 1, 3.0), (2, 2, 2.0), (3, 3, 1.0)])
    assert min(found.fixed_s, found.load_s, found.pair_s) >= 0
    assert 0.3 < found.worst_error < 2


def row(tokens: int, seconds: float) -> dict:
    return {
        **{"shape": f"2048,768,{EXPERTS},{TOP_K}", "dtype": "int8", "kernel": "native"},
        **{"tokens": tokens, "ms": 1e3 * seconds},
    }


def test_a_document(tmp_path: Path) -> None:
    sizes = [1, 8, 64, 512, 2048]
    measured = calls(0.0, 4e-4, 2e-5, sizes)
    rows = [row(n, seconds) for n, (_, _, seconds) in zip(sizes, measured, strict=True)]
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"rows": rows}))
    ((kernel, found),) = read_fits(path).items()
    assert kernel == ("2048,768,128,8", "int8", "native")
    assert found.load_s == pytest.approx(4e-4)
    assert found.pair_s == pytest.approx(2e-5)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "no document"),
        ('{"rows": [{}]}', "no document"),
        ('{"rows": []}', "at least 3 batch sizes"),
        (json.dumps({"rows": [row(1, 1.0), row(2, 1.0)]}), "at least 3 batch sizes"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "bench.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=named):
        read_fits(path)
    with pytest.raises(ConfigError, match="gone"):
        read_fits(tmp_path / "gone.json")
