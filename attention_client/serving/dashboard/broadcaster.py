"""Polls the cluster for the dashboard, in the attention client: once a second while anyone views it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from attention_client.serving.dashboard.sections import FAILED, draw, draw_placement
from eaas.cluster_snapshot import ClusterSnapshot
from eaas.log import get_logger

__all__ = ["Broadcaster", "Poller"]

_log = get_logger(__name__)
_POLL_S = 1.0
_CLOSE_S = 1.0


class Poller(Protocol):
    """The dashboard's source of cluster snapshots (`eaas.cluster_snapshot.SnapshotReader`)."""

    def look(self) -> ClusterSnapshot:
        """Read the state of the cluster from its processes. Takes up to about a second, in a thread."""

    def close(self) -> None:
        """End the connections to the cluster and the threads that use them, when the endpoint stops."""


class Broadcaster:
    """Draws each cluster snapshot once and shows it to all viewers of the page.

    Call it from the event loop's thread only. Another thread polls and draws.
    """

    def __init__(self, open_poller: Callable[[], Poller]) -> None:
        self._open_poller = open_poller
        self._poller: Poller | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dashboard")
        self._viewers: dict[object, Callable[[], None]] = {}
        self._task: asyncio.Task[None] | None = None
        self._layers: dict[int, str] = {}
        self.snapshot = ClusterSnapshot()
        self.sections = draw(self.snapshot)

    def join(self, viewer: object, on_drawn: Callable[[], None]) -> None:
        """Add a viewer of the page; the first one starts the polls. `on_drawn` is called after each poll."""
        self._viewers[viewer] = on_drawn
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._poll_repeatedly())

    def leave(self, viewer: object) -> None:
        """Remove a viewer of the page; polls end after the last one left. Idempotent."""
        self._viewers.pop(viewer, None)

    def placement(self, layer: int) -> str:
        """Return the drawing of an MoE layer's placement, kept until the next poll for all viewers."""
        if layer not in self._layers:
            self._layers[layer] = draw_placement(self.snapshot, layer)
        return self._layers[layer]

    async def close(self) -> None:
        """End the polls, when the endpoint stops. Wait at most a second for a running one."""
        self._viewers.clear()
        if self._task is not None:
            self._task.cancel()
        if self._poller is not None:
            loop = asyncio.get_running_loop()
            closing = loop.run_in_executor(self._thread, self._poller.close)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(closing), _CLOSE_S)
        self._thread.shutdown(wait=False)

    async def _poll_repeatedly(self) -> None:
        logged = ""
        try:
            while self._viewers:
                begun = time.monotonic()
                polled, shown = await self._refresh(), self._show()
                error = polled or shown
                # Log an error once, not once a second.
                if error is not None and logged != repr(error):
                    _log.error("the dashboard cannot be drawn", exc_info=error)
                logged = repr(error) if error is not None else ""
                await asyncio.sleep(max(0.1, _POLL_S - (time.monotonic() - begun)))
        finally:
            self._task = None

    async def _refresh(self) -> Exception | None:
        """Poll and draw. On failure keep the last drawing, mark it as old and return the error."""
        loop = asyncio.get_running_loop()
        try:
            self.snapshot, self.sections = await loop.run_in_executor(self._thread, self._poll)
        except Exception as error:  # noqa: BLE001 (logged and shown)
            self.sections = self.sections | {"alerts": FAILED}
            return error
        self._layers.clear()
        return None

    def _show(self) -> Exception | None:
        """Update the page of every viewer; return the error of one of them, if any."""
        failed = None
        for on_drawn in tuple(self._viewers.values()):
            try:
                on_drawn()
            except Exception as error:  # noqa: BLE001 (logged; the other viewers are updated)
                failed = error
        return failed

    def _poll(self) -> tuple[ClusterSnapshot, dict[str, str]]:
        if self._poller is None:
            self._poller = self._open_poller()
        snapshot = self._poller.look()
        return snapshot, draw(snapshot)
