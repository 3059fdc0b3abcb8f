"""Looks at the cluster once a second for all viewers together, and not at all while there is none."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from attention_client.dashboard.sections import FAILED, draw, draw_placement
from eaas.facts import Facts
from eaas.log import get_logger

__all__ = ["Hub", "Looker"]

_log = get_logger(__name__)
_LOOK_S = 1.0
_CLOSE_S = 1.0


class Looker(Protocol):
    """What the facts come from (`eaas.facts.FactsReader`)."""

    def look(self) -> Facts:
        """The facts now; takes a second or so at most."""

    def close(self) -> None:
        """Ends connections and threads."""


class Hub:
    """For the event loop's thread alone; looking and drawing is done in another one.

    Args:
        open_looker: Makes what looks, once somebody wants to see something.
    """

    def __init__(self, open_looker: Callable[[], Looker]) -> None:
        self._open_looker = open_looker
        self._looker: Looker | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dashboard")
        self._viewers: dict[object, Callable[[], None]] = {}
        self._task: asyncio.Task[None] | None = None
        self._layers: dict[int, str] = {}
        self.facts = Facts()
        self.sections = draw(self.facts)

    @property
    def viewers(self) -> int:
        """How many are shown what is drawn."""
        return len(self._viewers)

    def join(self, viewer: object, on_drawn: Callable[[], None]) -> None:
        """A viewer comes; `on_drawn` is called whenever something may have changed."""
        self._viewers[viewer] = on_drawn
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._keep_looking())

    def leave(self, viewer: object) -> None:
        """A viewer goes. Idempotent."""
        self._viewers.pop(viewer, None)

    def placement(self, layer: int) -> str:
        """The placement of a layer, drawn once for all who look at it."""
        if layer not in self._layers:
            self._layers[layer] = draw_placement(self.facts, layer)
        return self._layers[layer]

    async def close(self) -> None:
        """Ends what looks. A look that takes long is not waited for: its thread ends it."""
        self._viewers.clear()
        if self._task is not None:
            self._task.cancel()
        if self._looker is not None:
            loop = asyncio.get_running_loop()
            closing = loop.run_in_executor(self._thread, self._looker.close)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(closing), _CLOSE_S)
        self._thread.shutdown(wait=False)

    async def _keep_looking(self) -> None:
        complaint = ""
        try:
            while self._viewers:
                begun = time.monotonic()
                looked, shown = await self._refresh(), self._show()
                error = looked or shown
                # Once, and not once a second.
                if error is not None and complaint != repr(error):
                    _log.error("the dashboard cannot be drawn", exc_info=error)
                complaint = repr(error) if error is not None else ""
                # No faster than it can be looked, and no viewer waits longer than that for its end.
                await asyncio.sleep(max(0.1, _LOOK_S - (time.monotonic() - begun)))
        finally:
            self._task = None

    async def _refresh(self) -> Exception | None:
        """Look and draw; says what went wrong. What was drawn last stays then, and is said to be old."""
        loop = asyncio.get_running_loop()
        try:
            self.facts, self.sections = await loop.run_in_executor(self._thread, self._look)
        except Exception as error:  # noqa: BLE001 (logged, and shown)
            self.sections = self.sections | {"alerts": FAILED}
            return error
        self._layers.clear()
        return None

    def _show(self) -> Exception | None:
        """Have every viewer shown it; says what went wrong with one of them."""
        failed = None
        for on_drawn in tuple(self._viewers.values()):
            try:
                on_drawn()
            except Exception as error:  # noqa: BLE001 (logged; the other viewers are shown it)
                failed = error
        return failed

    def _look(self) -> tuple[Facts, dict[str, str]]:
        if self._looker is None:
            self._looker = self._open_looker()
        facts = self._looker.look()
        return facts, draw(facts)
