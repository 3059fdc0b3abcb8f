"""The operator's buttons on one viewer's page."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from nicegui import ui

from attention_client.serving.dashboard.broadcaster import Broadcaster
from attention_client.serving.dashboard.components import Press
from attention_client.serving.dashboard.operator import Operator
from eaas.errors import EaasError
from eaas.types import Member, Role

__all__ = ["Controls"]

# Buttons kept for servers that left. They keep their place, so that no button moves under the pointer.
_MOST_GONE = 16


class Controls:
    """The buttons, within a page."""

    def __init__(self, operator: Operator, broadcaster: Broadcaster) -> None:
        self._operator, self._broadcaster = operator, broadcaster
        self._servers: dict[str, Member] = {}
        self._kills: dict[str, Press] = {}
        with ui.element("div").classes("row-of-buttons"):
            # The default is the current number of servers: pressing the button then changes nothing.
            self._number = number = ui.number("Servers", value=None, min=1, precision=0)
            number.props("outlined dense").classes("short")
            label = "Scale to that number of servers"
            scale = self._acts(label, lambda: operator.scale(broadcaster.snapshot, number.value))
            Press("Scale", scale, label=label)
            label = "Rebalance now"
            rebalance = self._acts(label, lambda: operator.rebalance(broadcaster.snapshot))
            Press(label, rebalance, kind="plain")
        self._rows = ui.element("div").classes("servers scroll")
        self._status = (
            ui.label("").classes("note").props('role="status" data-part="operate-status"')
        )

    def show(self) -> None:
        """Show the current servers. New ones come last; the others keep their place."""
        members = (m.member for m in self._broadcaster.snapshot.members)
        self._servers = {m.id: m for m in members if m.role is Role.EXPERT_SERVER}
        for name in self._servers:
            if name not in self._kills:
                with self._rows:
                    kill = self._kill_of(name)
                    self._kills[name] = Press("Kill", kill, subject=name, kind="danger", asks=True)
        gone = [name for name in self._kills if name not in self._servers]
        for name in gone[: max(0, len(gone) - _MOST_GONE)]:
            self._kills.pop(name).delete()
        for name, button in self._kills.items():
            server = self._servers.get(name)
            alive = server is not None and not server.state.is_gone
            incarnation = server.incarnation if server is not None else 0
            button.show("Kill", asks=True, enabled=alive, token=incarnation)
        if self._number.value is None and self._servers:
            self._number.set_value(len(self._broadcaster.snapshot.live(Role.EXPERT_SERVER)))

    def _acts(self, what: str, act: Callable[[], str]) -> Callable[[Any], Any]:
        return lambda _token: self._act(what, act)

    def _kill_of(self, name: str) -> Callable[[Any], Any]:
        async def kill(incarnation: object) -> None:
            server = self._servers.get(name)
            # The confirmation is for the incarnation that the browser showed.
            if server is not None and server.incarnation == incarnation:
                await self._act(f"Kill {name}", lambda: self._operator.kill(server))

        return kill

    async def _act(self, what: str, act: Callable[[], str]) -> None:
        self._status.set_text(f"{what} …")
        try:
            result = await asyncio.get_running_loop().run_in_executor(None, act)
        except EaasError as error:
            result = str(error)
        self._status.set_text(result)
