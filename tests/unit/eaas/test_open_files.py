"""Errors name a limit of open files that is too low."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from eaas.errors import CheckpointError
from eaas.open_files import free_files, shortage_of_files
from eaas_cli import commands as cli
from few_files import few_files, no_files


def limited(soft: int, hard: int, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["prlimit", f"--nofile={soft}:{hard}", sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (20, ("up",)),
        (90, ("up",)),
        (200, ("up", "--servers", "40")),
        (32, ("balancer", "--join", "127.0.0.1:1")),
        (32, ("attention-client", "--join", "127.0.0.1:1")),
    ],
)
def test_a_low_limit_is_named(limit: int, words: tuple[str, ...], tmp_path: Path) -> None:
    model = ("--model", str(tmp_path)) if words[0] in ("up", "attention-client") else ()
    done = limited(limit, limit, "-m", "eaas_cli", *words, *model)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("eaas: error: ")]
    assert len(lines) == 1
    assert f"limit of open files is {limit}" in lines[0]
    assert "ulimit -n" in lines[0]
    assert f"eaas {words[0]}" in lines[0]
    assert "Traceback" not in done.stderr


def test_the_soft_limit_is_raised() -> None:
    code = """
import resource
from eaas.open_files import prepare_open_files
prepare_open_files("it")
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    assert limited(24, 512, "-c", code).stdout.strip() == "(512, 512)"


@pytest.fixture
def nothing_free() -> Iterator[int]:
    """This process can open no file; the fixture is its limit."""
    with few_files(1) as limit, no_files():
        yield limit


def test_an_error_of_any_file_names_the_limit(
    nothing_free: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read_a_file() -> None:
        try:
            Path("generation_config.json").read_text()
        except OSError as error:
            raise CheckpointError("generation_config.json cannot be used: mend it") from error

    monkeypatch.setattr(cli, "app", read_a_file)
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    said = capsys.readouterr().err
    assert f"too many open files, the limit is {nothing_free}: " in said
    assert "generation_config.json" not in said


def test_errors_of_libraries() -> None:
    told = shortage_of_files(RuntimeError("I/O error: Too many open files (os error 24)"))
    assert told is not None
    assert "ulimit -n" in told
    told = shortage_of_files(OSError(errno.ENFILE, os.strerror(errno.ENFILE)))
    assert told is not None
    assert "fs.file-max" in told
    assert shortage_of_files(OSError(errno.ENOENT, os.strerror(errno.ENOENT))) is None


def test_free_files() -> None:
    before = free_files()
    with open(os.devnull):
        assert free_files() == before - 1
