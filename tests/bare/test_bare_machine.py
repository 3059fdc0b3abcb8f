"""README's first command, and a wheel, on Debian as it comes: an ordinary user, and no local wheels."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from service_box import free_port

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
_RUN_S = 1800.0

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(_RUN_S + 100),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("debootstrap") is None,
        reason="needs root and debootstrap",
    ),
]


def first_request(machine: Path, *command: str, packages: str | None = None) -> str:
    """Start a cluster by this command on a bare machine; return what was printed. The answer is complete."""
    environment = os.environ | ({"PACKAGES": packages} if packages else {})
    port, *words = command
    script = [HERE / "bare_machine.sh", machine.name, machine, "tests/bare/first_request.sh"]
    try:
        done = subprocess.run(
            [*script, port, *words],
            cwd=HERE,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_RUN_S,
        )
    finally:
        # pytest keeps the directories of its last runs, and this one is large.
        if machine.exists():
            shutil.rmtree(machine)
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert answer["usage"]["completion_tokens"] == 32
    return done.stdout


@pytest.mark.parametrize("suite", ["bookworm", "trixie"])
def test_make_up_serves(suite: str, tmp_path: Path) -> None:
    port = str(free_port())
    printed = first_request(tmp_path / suite, port, "make", "up", f"PORT={port}")
    megabytes = int(re.findall(r"\.venv: (\d+) MB", printed)[0])
    if "torch: the CPU build" in printed:
        assert megabytes <= 1800


def test_a_wheel_serves_without_a_compiler(tmp_path: Path) -> None:
    files = tmp_path / "bookworm.files"
    build = [sys.executable, "-m", "uv", "build", "--wheel", "--out-dir", files, ROOT]
    subprocess.run(build, check=True, capture_output=True, timeout=600)
    (wheel,) = files.glob("*.whl")
    port = str(free_port())
    install = f".venv/bin/pip install -q -c constraints.txt './{wheel.name}[serve,server]'"
    up = f"exec .venv/bin/eaas up --model examples/demo --port {port}"
    printed = first_request(
        tmp_path / "bookworm",
        port,
        *("bash", "-c", f"python3 -m venv .venv && {install} && {up}"),
        packages="python3,python3-venv,git",
    )
    assert "passes:   uncompiled" in printed
