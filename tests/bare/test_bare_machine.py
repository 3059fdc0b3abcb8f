"""README's first command on Debian as it comes: an ordinary user, no local wheels, an empty environment."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from service_box import free_port

HERE = Path(__file__).parent
_RUN_S = 1800.0

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(_RUN_S + 100),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("debootstrap") is None,
        reason="needs root and debootstrap",
    ),
]


@pytest.mark.parametrize("suite", ["bookworm", "trixie"])
def test_make_up_serves(suite: str, tmp_path: Path) -> None:
    command = ["env", f"PORT={free_port()}", "tests/bare/first_command.sh"]
    machine = tmp_path / suite
    try:
        done = subprocess.run(
            [HERE / "bare_machine.sh", suite, machine, *command],
            cwd=HERE,
            capture_output=True,
            text=True,
            timeout=_RUN_S,
        )
    finally:
        # pytest keeps the directories of its last runs, and this one is large.
        shutil.rmtree(machine)
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert answer["usage"]["completion_tokens"] == 32
    megabytes = int(re.findall(r"\.venv: (\d+) MB", done.stdout)[0])
    if "torch: the CPU build" in done.stdout:
        assert megabytes <= 1800
