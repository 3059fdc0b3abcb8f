"""`dashboard_process` as a test sees it."""

from __future__ import annotations

from pathlib import Path

from eaas.bench.worker import Worker
from eaas.local.nursery import Nursery
from eaas.local.process import stop_all, wait_ready

__all__ = ["Theatre"]

# On a busy machine.
PATIENCE_S = 120.0


class Theatre:
    """A process whose page shows the scene that is asked for.

    Attributes:
        url: Of the page.
    """

    def __init__(self, nursery: Nursery, keys: Path | None = None) -> None:
        self._worker = Worker("theatre", "dashboard_process", nursery, keys=keys and str(keys))
        wait_ready([self._worker], PATIENCE_S)
        assert self._worker.address is not None
        self.url = self._worker.address

    def show(self, scene: str) -> None:
        self._worker.tell(scene, PATIENCE_S)
        self._worker.hear()

    def close(self) -> None:
        stop_all([self._worker])
