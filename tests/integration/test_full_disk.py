"""A full disk loses log lines but does not end the process that writes them."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eaas_cli.chaos.cluster import free_port
from waiting import eventually

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_a_role_whose_log_is_on_a_full_disk_serves() -> None:
    """At its start, while it serves, and at its end."""
    port = free_port("127.0.0.1")
    command = [sys.executable, "-m", "eaas_cli", "monitor", "--port", str(port)]
    with Path("/dev/full").open("wb") as full, subprocess.Popen(command, stderr=full) as monitor:
        try:
            eventually(lambda: monitor.poll() is not None or not is_free(port), 30)
            # It serves before it logs that it does.
            time.sleep(0.3)
            assert monitor.poll() is None
            monitor.send_signal(signal.SIGTERM)
            assert monitor.wait(20) == 0
        finally:
            monitor.kill()
