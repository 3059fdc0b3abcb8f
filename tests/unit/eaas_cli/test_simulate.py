"""`eaas simulate ...` from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from eaas_cli.commands import main

ROOT = Path(__file__).parents[3]


def eaas(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "eaas_cli", "simulate", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_a_worker_needs_neither_torch_nor_grpc() -> None:
    code = "import sys, simulator.caps.pool; print({'torch', 'grpc', 'transformers'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert (done.stdout, done.stderr) == ("set()\n", "")


SMALL = ("caps", "--requests", "80", "--seeds", "1,2", "--rates", "150,200")


def test_caps_prints_its_document_and_writes_its_files(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "results"
    done = eaas(
        *(*SMALL, "--pattern", "bursty", "--strategies", "lpt,greedy_variance"),
        *("--out", str(out), "--json"),
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["strategies"] == ["fcfs", "greedy_variance", "lpt"]
    assert list(document["bursty"]) == ["150", "200"]
    assert document["bursty"]["200"]["_improvements"].keys() == {"lpt", "greedy_variance"}
    assert "poisson" not in document
    assert json.loads((out / "results.json").read_text()) == document
    for name in ("p99", "gains"):
        assert (out / f"{name}.pdf").read_bytes().startswith(b"%PDF")
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_caps_prints_a_table() -> None:
    done = eaas(*SMALL, "--strategies", "random")
    assert done.returncode == 0, done.stderr
    for word in ("bursty", "poisson", "random", "fcfs", "events/s", "fitted"):
        assert word in done.stdout
    assert done.stderr == ""  # no progress bar in a pipe


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("caps", "--strategies", "fcfs,gready"), "'gready'"),
        (("caps", "--strategies", ""), "''"),
        (("caps", "--rates", "150,0"), "--rates 150,0"),
        (("caps", "--rates", "fast"), "--rates fast"),
        (("caps", "--seeds", "1,,2"), "--seeds 1,,2"),
        (("caps", "--requests", "0"), "--requests"),
        (("caps", "--pattern", "steady"), "--pattern"),
        (("caps", "--out", "/dev/null/x"), "--out /dev/null/x"),
    ],
)
def test_a_mistake_is_one_line_and_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    named: str,
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["eaas", "simulate", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert named in err
    assert out == ""
    assert "Traceback" not in err
