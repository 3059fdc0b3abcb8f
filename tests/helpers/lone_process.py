"""Start and control a `lone_client` process."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

from eaas_cli.local.fork_server import ForkServer
from eaas_cli.local.process import ChildProcess
from lone_client import ID

__all__ = ["LoneClient"]

# On a busy machine.
PATIENCE_S = 60.0


class LoneClient(ChildProcess):
    """A `lone_client` process."""

    def __init__(
        self, cluster: Any, transport: str, how: str, log_dir: Path, fork_server: ForkServer
    ) -> None:
        arguments = (cluster.monitor_address, str(cluster.model), transport, how)
        super().__init__(ID, arguments, log_dir, module="lone_client", fork_server=fork_server)
        self._said = log_dir / f"{ID}.log"

    def wait_for(self, word: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while word not in self._said.read_text():
            assert self.running, self.last_words()
            assert time.monotonic() < deadline, f"it is not {word}"
            time.sleep(0.02)

    @property
    def answers(self) -> int:
        return self._said.read_text().count("answer\n")

    def end(self) -> None:
        self.signal(signal.SIGKILL)
        assert self.reap(PATIENCE_S)
