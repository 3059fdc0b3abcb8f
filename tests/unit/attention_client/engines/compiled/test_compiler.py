"""A pass that cannot be compiled: the log says why, the engine goes on, and nothing is left running."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attention_client.engines.transformers.compiled import compiler as module
from attention_client.engines.transformers.compiled.compiler import PassCompiler
from eaas.checkpoint import Checkpoint


@pytest.fixture
def compiler(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> PassCompiler:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # No test compiles; each gets beyond the look for a compiler.
    program = tmp_path / "bin/g++"
    program.parent.mkdir()
    program.symlink_to("/bin/false")
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    return PassCompiler(Checkpoint.open(checkpoint()), 1)


def run(compiler: PassCompiler, caplog: pytest.LogCaptureFixture) -> str:
    used: list[Any] = []
    with caplog.at_level(logging.WARNING):
        compiler.start(used.append)
        assert compiler._thread is not None
        compiler._thread.join(60)
    assert not used
    return caplog.text


def test_without_a_compiler(
    compiler: PassCompiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    assert "needs g++" in run(compiler, caplog)


def test_a_model_that_breaks(
    compiler: PassCompiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert "cannot be compiled (no message)" in run(compiler, caplog)


def test_a_model_larger_than_the_free_memory(
    compiler: PassCompiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "free_bytes", lambda: 1000)
    assert re.search(r"takes about .* GB of memory, and 0\.0 GB are free", run(compiler, caplog))


def test_a_compiler_that_is_killed(
    compiler: PassCompiler,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    program = tmp_path / "dies"
    program.write_text("#!/bin/sh\nkill -9 $$\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert "was killed: memory ran out, perhaps" in run(compiler, caplog)


def test_a_damaged_library(
    compiler: PassCompiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library = Path(os.environ["XDG_CACHE_HOME"]) / "pass.so"
    library.write_text("no code")
    monkeypatch.setattr(module, "library_of", lambda key: library)
    assert "stay uncompiled" in run(compiler, caplog)


def runs(pid: str) -> bool:
    """Whether a process has not ended; nobody may wait for it."""
    try:
        return ") Z " not in Path("/proc", pid, "stat").read_text()
    except OSError:
        return False


def test_close_ends_the_compilation(
    compiler: PassCompiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "python"
    # Its child is a compiler.
    child = tmp_path / "child"
    program.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {child}\nwait\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    compiler.start(lambda compiled: None)
    deadline = time.monotonic() + 30
    while not (child.exists() and child.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    compiler.close()
    assert compiler._process is not None
    assert compiler._process.poll() is not None
    while runs(child.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert compiler._thread is not None
    assert not compiler._thread.is_alive()
    compiler.close()
