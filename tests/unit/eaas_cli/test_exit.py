"""Ctrl-C at moments at which no command has begun, or one has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from interpreted_triton import needs_triton

WAITS = "print('waits', flush=True); import time; time.sleep(60)"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("typer", WAITS),
        # KeyboardInterrupt would become another error.
        (
            "typer",
            f"try:\n    {WAITS}\nexcept BaseException as error:\n    raise ImportError from error",
        ),
        ("sitecustomize", f"import atexit\natexit.register(lambda: exec({WAITS!r}))"),
    ],
    ids=["import", "wrapping import", "exit"],
)
def test_it_ends_with_130_and_no_traceback(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / f"{name}.py").write_text(text)
    with subprocess.Popen(
        [sys.executable, "-m", "eaas_cli", "--version"],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[3]}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        while "waits" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "")


def test_an_ignored_ctrl_c_stays_ignored(tmp_path: Path) -> None:
    """As that of a background job of a script."""
    (tmp_path / "typer.py").write_text("import os; os.kill(os.getpid(), 2); import absent")
    code = "import signal; signal.signal(2, signal.SIG_IGN); from eaas_cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[3]}"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 1
    assert "No module named 'absent'" in done.stderr


PROGRAM = """
import sys
import triton
import eaas_cli.commands as commands
sys.argv[1:] = ["--version"]
print("before", file=sys.stderr)
commands.main()
"""


@needs_triton
def test_tritons_bindings_print_no_leaks() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "before\n")
