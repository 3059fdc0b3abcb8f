"""`eaas up` in a pipe prints how far servers are with a long load."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.chaos, pytest.mark.nightly, pytest.mark.timeout(300)]


def test_lines_for_a_long_load(
    shell_model: Path, start_up: Callable[..., Any], tmp_path: Path
) -> None:
    """The others load the experts of a killed server, 25 KB each, in about 13 s."""
    file = tmp_path / "cluster.yaml"
    file.write_text("balancer: {dead_grace_s: 0.5}\nexpert_server: {load_bytes_per_s: 15000}\n")
    up = start_up(shell_model, "--config", str(file))
    up.wait_serving()
    os.kill(up.member("expert-server-2")["pid"], signal.SIGKILL)
    up.wait_output(r"(expert-server-0) loads 0\.\d of 0\.2 MB \(\d+ %\), 0\.0 MB/s, \d+ s left\n")
    up.until(lambda: up.status()["coverage"]["min_replicas"] == 2)
    assert set(re.findall(r"(\S+) loads ", up.output)) == {"expert-server-0", "expert-server-1"}
