"""The launcher's side of `dashboard_process`."""

from __future__ import annotations

from benchmarks.harness.worker import Worker
from eaas_cli.local.fork_server import ForkServer
from eaas_cli.local.process import stop_all, wait_ready

__all__ = ["UiFixture"]

PATIENCE_S = 120.0  # for a busy machine


class UiFixture:
    """A process with a dashboard that shows simulated clusters.

    Attributes:
        url: The page's URL.
    """

    def __init__(self, fork_server: ForkServer) -> None:
        self._worker = Worker("ui_fixture", "dashboard_process", fork_server)
        wait_ready([self._worker], PATIENCE_S)
        assert self._worker.address is not None
        self.url = self._worker.address

    def show(self, scene: str) -> None:
        """Show a scene of `dashboard_process`; return when it is drawn."""
        self._worker.send(scene, PATIENCE_S)
        self._worker.receive()

    def close(self) -> None:
        """End the process."""
        stop_all([self._worker])
