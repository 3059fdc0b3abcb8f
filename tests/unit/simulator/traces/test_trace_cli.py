"""`eaas trace`: its output, and one line and exit code 2 for a mistake."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from eaas.errors import EaasError
from eaas_cli.commands import app
from simulator.traces import read_trace
from simulator.traces.arrays import Meaning

SMALL = ["--iterations", "40", "--layers", "2", "--experts", "16", "--tokens", "64", "--top-k", "2"]


def run(*words: object) -> str:
    result = CliRunner().invoke(app, ["trace", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout


@pytest.fixture
def made(tmp_path: Path) -> Path:
    path = tmp_path / "made.npz"
    assert run("generate", path, "--regime", "flips", *SMALL) == (
        f"wrote {path}: 40 iterations, 2 layers, 16 experts\n"
    )
    return path


def test_a_trace_is_made_converted_and_described(made: Path) -> None:
    for suffix in (".csv", ".npy", ".npz"):
        copy = made.with_name(f"copy{suffix}")
        assert run("convert", made, copy) == (
            f"wrote {copy}: 40 iterations, 2 layers, 16 experts\n"
        )
        back = read_trace(copy, Meaning("counts"))
        assert np.array_equal(back.counts_ILE, read_trace(made).counts_ILE)
    document = json.loads(run("info", made, "--json"))
    assert (document["iterations"], document["layers"], document["experts"]) == (40, 2, 16)
    assert document["notes"]["regime"]["name"] == "flips"
    shown = run("info", made)
    assert "iterations" in shown
    assert "flips" in shown


def test_compare_for_programs_and_for_people(made: Path, tmp_path: Path) -> None:
    sizes = ["--servers", "2,4", "--interval", "8"]
    document = json.loads(
        run("compare", made, "--policy", "static", "--policy", "eplb", *sizes, "--json")
    )
    assert list(document) == ["rows"]
    assert [(row["policy"], row["servers"]) for row in document["rows"]] == [
        *(("static", 2), ("eplb", 2)),
        *(("static", 4), ("eplb", 4)),
    ]
    plot = tmp_path / "par.png"
    shown = run("compare", made, "--policy", "eplb", *sizes, "--plot", plot)
    assert plot.stat().st_size > 1000
    assert "score 100: EPLB" in shown
    assert len([line for line in shown.splitlines() if "eplb" in line]) == 2


def test_info_against_published_figures(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    run("generate", path, "--iterations", "20", "--layers", "1", "--tokens", "64")
    against = json.loads(run("info", path, "--against", "LmSys", "--json"))["against"]
    assert [row["servers"] for row in against["rows"]] == [32, 64, 128, 256]
    assert "LmSys" in run("info", path, "--against", "LmSys")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["generate", "nowhere/x.npz"], "nowhere"),
        (["generate", "x.npz", "--regime", "wild"], "skewed, drift"),
        (["info", "no.npz"], "no.npz does not exist"),
        (["convert", "made.npz", "x.pt"], ".npz, .npy, .csv"),
        (["convert", "ids.npy", "x.npz"], "--kind counts or --kind ids"),
        (["info", "ids.npy"], "`eaas trace convert`"),
        (["compare", "ids.npy"], "`eaas trace convert`"),
        (["convert", "ids.npy", "x.npz", "--kind", "ids"], "--experts"),
        (["info", "made.npz", "--against", "x"], "LmSys"),
        (["record", "x.npz", "--model", "nowhere"], "nowhere does not exist"),
        (["record", "x.txt", "--model", "nowhere"], "x.txt"),
        (["compare", "made.npz", "--servers", "2,x"], "--servers"),
        (["compare", "made.npz", "--interval", "0"], "--interval"),
        (["compare", "made.npz", "--interval", "8", "--slots", "3"], "slots 3"),
        (["compare", "made.npz", "--plot", "x.pdf"], ".png"),
    ],
)
def test_mistakes(made, monkeypatch, words, named) -> None:
    monkeypatch.chdir(made.parent)
    np.save("ids.npy", np.tile(np.array([5, 2]), (90, 3, 1)))
    before = sorted(path.name for path in Path().iterdir())
    with pytest.raises(EaasError) as caught:
        CliRunner().invoke(app, ["trace", *words], catch_exceptions=False)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in Path().iterdir()) == before


def test_an_array_that_may_be_either_ends_in_one_line_and_exit_code_2(tmp_path: Path) -> None:
    source = tmp_path / "routing.npy"
    np.save(source, np.tile(np.array([5, 2]), (2079, 32, 1)))
    words = [sys.executable, "-m", "eaas_cli", "trace", "convert", source, tmp_path / "x.npz"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    for part in (str(source), "(2079, 32, 2)", "2079 tokens x 32 layers x top-2", "--kind"):
        assert part in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["routing.npy"]


def test_recording_ends_in_a_trace(tmp_path: Path) -> None:
    model = tmp_path / "demo"
    small = ["--layers", "2", "--hidden", "64", "--experts", "8", "--top-k", "2"]
    CliRunner().invoke(app, ["demo-model", str(model), *small], catch_exceptions=False)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Hello there\n")
    target = tmp_path / "x.npz"
    run("record", target, "--model", model, "--prompts", prompts, "--max-tokens", 3)
    recorded = read_trace(target)
    assert recorded.counts_ILE.shape[1:] == (2, 8)
    assert recorded.notes["model"] == "demo"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo", "prompts.txt", "x.npz"]
