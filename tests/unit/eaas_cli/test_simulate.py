"""`eaas simulate ...` from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eaas_cli.commands import app, main

CAPS = ("caps", "--requests", "80", "--seeds", "1,2", "--rates", "150,200")


def simulate(*words: object) -> str:
    """Standard output of a command that says nothing on standard error."""
    result = CliRunner().invoke(app, ["simulate", *map(str, words)], catch_exceptions=False)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def test_a_worker_needs_neither_torch_nor_grpc() -> None:
    code = "import sys, simulator.caps.cells; print({'torch', 'grpc', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_caps_prints_its_document_and_draws_it(tmp_path: Path) -> None:
    plot = tmp_path / "p99.png"
    words = (*CAPS, "--pattern", "bursty", "--strategies", "lpt,greedy_variance", "--json")
    result = CliRunner().invoke(app, ["simulate", *words, "--plot", str(plot)])
    document = json.loads(result.stdout)
    assert document["strategies"] == ["fcfs", "greedy_variance", "lpt"]
    assert list(document["bursty"]) == ["150", "200"]
    assert document["bursty"]["200"]["_improvements"].keys() == {"lpt", "greedy_variance"}
    assert "poisson" not in document
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_caps_prints_a_table() -> None:
    shown = simulate(*CAPS, "--strategies", "random")
    for word in ("bursty", "poisson", "random", "fcfs", "events/s", "fitted"):
        assert word in shown


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Ten minutes of ten requests at a time, ten of one."""
    return traffic(tmp_path, [1000 * at for at in (*range(0, 600, 1), *range(600, 1200, 5))], 100)


def traffic(directory: Path, times: list[float], tokens: int) -> Path:
    path = directory / "requests.jsonl"
    rows = ({"timestamp": at, "input_length": 100, "output_length": tokens} for at in times)
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_autoscale_prints_its_document(trace: Path) -> None:
    document = json.loads(simulate("autoscale", "--trace", trace, "--fixed", "2,4,4", "--json"))
    assert document["trace"]["requests"] == 720
    names = [group["group"] for group in document["groups"]]
    assert names == ["autoscaled", "fixed 2", "fixed 4"]
    autoscaled, small, large = document["groups"]
    # 4 servers are right for the busiest minute, and where it starts.
    assert document["autoscaler"]["max_servers"] == 4
    assert document["servers_over_time"][0] == [0.0, 4]
    assert autoscaled["servers"]["fewest"] == 2
    assert small["server_hours"] < autoscaled["server_hours"] < large["server_hours"]
    saved = 1 - autoscaled["server_hours"] / large["server_hours"]
    assert large["saved_by_autoscaling"] == pytest.approx(saved)
    assert large["saved_at_end"] == pytest.approx(0.5)
    shown = simulate("autoscale", "--trace", trace, "--fixed", "4", "--start", "2")
    rows = [line.split() for line in shown.splitlines() if "fixed 4" in line]
    assert rows[0][:5] == ["fixed", "4", "4", "4", "4"]
    assert "Assumptions" in shown


def test_a_trace_in_seconds_is_read_so_and_said(tmp_path: Path) -> None:
    path = str(traffic(tmp_path, [i / 2 for i in range(240)], 10))
    for unit, seconds, said in (
        (None, 119.5, "timestamp is read in s, 240 requests in 119.5 s: --time-unit"),
        ("s", 119.5, ""),
        ("ms", 0.1195, "240 requests in 0.119 s, read in ms: --time-unit"),
    ):
        words = ["--trace", path, "--max-servers", "2", "--json"]
        words += [] if unit is None else ["--time-unit", unit]
        result = CliRunner().invoke(app, ["simulate", "autoscale", *words])
        assert json.loads(result.stdout)["trace"]["seconds"] == seconds
        assert said in result.stderr
        assert bool(said) == bool(result.stderr)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("caps --strategies fcfs,gready", "'gready'"),
        ("caps --strategies=", "''"),
        ("caps --rates 150,0", "--rates 150,0"),
        ("caps --rates fast", "--rates fast"),
        ("caps --seeds 1,,2", "--seeds 1,,2"),
        ("caps --requests 0", "--requests"),
        ("caps --pattern steady", "--pattern"),
        ("caps --plot x.pdf", "--plot x.pdf: give the name of a .png file"),
        ("autoscale", "give --trace FILE, or --paper in its place"),
        ("autoscale --trace x --paper", "give --trace FILE, or --paper in its place"),
        ("autoscale --trace x --fixed 8,0", "--fixed 8,0: give whole numbers of at least 1"),
        ("autoscale --trace no/such", "no/such: No such file or directory; give JSON lines"),
        ("autoscale --paper --config c.yaml", "min_servers 65 is above max_servers 64"),
    ],
)
def test_a_mistake_is_one_line_and_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    named: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("autoscaler: {min_servers: 65}")
    monkeypatch.setattr(sys, "argv", ["eaas", "simulate", *words.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert named in err
    assert out == ""
    assert "Traceback" not in err
