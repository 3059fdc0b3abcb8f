"""A pass that cannot be compiled: the log says why, the engine goes on, and nothing is left running."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attention_client.engines.transformers.compiled import compiler as module
from attention_client.engines.transformers.compiled.compiler import PassCompiler
from eaas.checkpoint import Checkpoint
from waiting import eventually


@pytest.fixture
def compiler(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> PassCompiler:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # No test compiles; each gets beyond the look for a compiler.
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/g++").symlink_to("/bin/false")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    return PassCompiler(Checkpoint.open(checkpoint()), 1)


def without_a_compiler(patch: pytest.MonkeyPatch, _folder: Path) -> None:
    patch.setenv("PATH", "")


def a_model_that_breaks(patch: pytest.MonkeyPatch, _folder: Path) -> None:
    patch.setattr(sys, "executable", "/bin/false")


def too_little_memory(patch: pytest.MonkeyPatch, _folder: Path) -> None:
    patch.setattr(module, "free_bytes", lambda: 1000)


def a_compiler_that_is_killed(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(sys, "executable", program(folder / "dies", "kill -9 $$"))


def a_damaged_library(patch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "pass.so").write_text("no code")
    patch.setattr(module, "library_of", lambda key: folder / "pass.so")


def program(path: Path, *lines: str) -> str:
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("obstacle", "why"),
    [
        (without_a_compiler, r"needs g\+\+"),
        (a_model_that_breaks, r"cannot be compiled \(no message\)"),
        (too_little_memory, r"takes about .* GB of memory, and 0\.0 GB are free"),
        (a_compiler_that_is_killed, "was killed: memory ran out, perhaps"),
        (a_damaged_library, "stay uncompiled"),
    ],
)
def test_the_log_says_why(
    compiler: PassCompiler,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    obstacle: Callable[[pytest.MonkeyPatch, Path], None],
    why: str,
) -> None:
    obstacle(monkeypatch, tmp_path)
    used: list[Any] = []
    with caplog.at_level(logging.WARNING):
        compiler.start(used.append)
        assert compiler._thread is not None
        compiler._thread.join(60)
    assert not used
    assert re.search(why, caplog.text)


def runs(pid: str) -> bool:
    """Whether a process has not ended; nobody may wait for it."""
    try:
        return ") Z " not in Path("/proc", pid, "stat").read_text()
    except OSError:
        return False


def test_close_ends_the_compilation(
    compiler: PassCompiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    child = tmp_path / "child"  # of the program: it is a compiler
    python = program(tmp_path / "python", "sleep 600 &", f"echo $! > {child}", "wait")
    monkeypatch.setattr(sys, "executable", python)
    compiler.start(lambda compiled: None)
    eventually(lambda: child.exists() and child.read_text().strip(), 30)
    compiler.close()
    assert compiler._process is not None
    assert compiler._process.poll() is not None
    eventually(lambda: not runs(child.read_text().strip()), 30)
    assert compiler._thread is not None
    assert not compiler._thread.is_alive()
    compiler.close()
