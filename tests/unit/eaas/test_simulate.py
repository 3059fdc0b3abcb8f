"""`eaas simulate ...` as a person calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from eaas.cli import main

ROOT = Path(__file__).parents[3]


def eaas(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "eaas", "simulate", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_a_worker_needs_neither_torch_nor_grpc() -> None:
    code = "import sys, simulator.caps.worker; print({'torch', 'grpc', 'transformers'} & set(sys.modules))"
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
    assert done.stderr == ""  # no bar where nobody looks


def test_policy_judges_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "".join(
            f'{{"timestamp": {7 * n}, "input_length": 1, "output_length": 1}}\n' for n in range(200)
        )
    )
    done = eaas(
        *("policy", "--requests", "100", "--seeds", "1", "--loads", "0.8", "--overloads", "1.5"),
        *("--trace", str(trace), "--step-us", "10,400,20", "--json"),
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [(row["arrivals"], row["load"], row["clustered"]) for row in rows] == [
        *[("bursty", 0.8, True), ("bursty", 1.5, True)],
        *[("poisson", 0.8, False), ("poisson", 1.5, False)],
        *[("trace.jsonl", 0.8, True), ("trace.jsonl", 0.8, False)],
    ]


def test_decisions_are_measured() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "eaas",
            "bench",
            "select",
            "--decisions",
            "20",
            "--size",
            "9,6",
            "--json",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert len(rows) == 16  # the default by both cost models, sure and unsure
    assert all(0 < row["p50_us"] <= row["p99_us"] for row in rows)


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
        (("policy", "--strategy", "best"), "'best'"),
        (("policy", "--loads", "0.5,1.5"), "--loads 0.5,1.5"),
        (("policy", "--step-us", "1,2"), "--step-us 1,2"),
        (("policy", "--trace", "gone.csv"), "gone.csv"),
        (("fit", "gone.json"), "gone.json"),
        (("replay", "gone.jsonl"), "gone.jsonl"),
        (("validate", "--strategies", "best"), "'best'"),
        (("validate", "--trace", "gone.csv"), "gone.csv"),
        (("validate", "--window-size", "2"), "--window-size 2"),
        (("validate", "--prompts", "gone.txt"), "give a --model"),
        (("validate", "--model", "examples/demo", "--prompts", "gone.txt"), "--prompts gone.txt"),
        (
            ("validate", *("--model", "examples/demo"), *("--prompts", "/dev/null")),
            "/dev/null: 0 tokens",
        ),
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
