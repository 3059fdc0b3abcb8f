"""The operator's buttons on one viewer's page of the dashboard; `Operator` does what they ask."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

from nicegui import ui

from attention_client.serving.dashboard.broadcaster import Broadcaster
from attention_client.serving.dashboard.components import Drawn, Press
from attention_client.serving.dashboard.operator import Operator, is_paused
from eaas.errors import EaasError
from eaas.types import Member, Role

__all__ = ["Controls"]

_HOST = socket.gethostname()

_Act = Callable[[str, Callable[[], str]], Awaitable[None]]


class Controls:
    """The operator's buttons: start, scale and rebalance, and two in the row of each expert server.

    Args:
        members: The table of the members, which shows the buttons of the rows.
    """

    def __init__(self, operator: Operator, broadcaster: Broadcaster, members: Drawn) -> None:
        self._operator, self._broadcaster, self._members = operator, broadcaster, members
        self._rows: dict[str, _Row] = {}
        with ui.element("div").classes("row-of-buttons"):
            self._button(
                "Start an expert server", lambda: operator.start_server(broadcaster.snapshot)
            )
            self._button(
                "Rebalance now", lambda: operator.rebalance(broadcaster.snapshot), kind="plain"
            )
        with ui.element("div").classes("row-of-buttons"):
            # The default is the current number of servers: pressing the button then changes nothing.
            self._number = number = ui.number("Servers", value=None, min=1, precision=0)
            number.props("outlined dense").classes("short")
            self._button(
                "Scale",
                lambda: operator.scale(broadcaster.snapshot, number.value),
                subject="to that number of servers",
            )
        self._status = (
            ui.label("").classes("note").props('role="status" data-part="operate-status"')
        )

    def show(self) -> None:
        """Update the rows' buttons to the current expert servers."""
        members = (m.member for m in self._broadcaster.snapshot.members)
        servers = {m.id: m for m in members if m.role is Role.EXPERT_SERVER}
        for name in servers:
            if name not in self._rows:
                with self._members:
                    self._rows[name] = _Row(name, self._operator, self._act)
            self._rows[name].show(servers[name])
        for name in self._rows.keys() - servers.keys():
            self._rows.pop(name).element.delete()
        if self._number.value is None and servers:
            self._number.set_value(len(self._broadcaster.snapshot.live(Role.EXPERT_SERVER)))

    def _button(
        self, verb: str, act: Callable[[], str], *, subject: str = "", kind: str = "main"
    ) -> None:
        async def press(_token: object) -> None:
            await self._act(f"{verb} {subject}".rstrip(), act)

        Press(verb, press, subject=subject, kind=kind)

    async def _act(self, what: str, act: Callable[[], str]) -> None:
        self._status.set_text(f"{what} …")
        try:
            result = await asyncio.get_running_loop().run_in_executor(None, act)
        except EaasError as error:
            result = str(error)
        self._status.set_text(result)


class _Row:
    """The buttons in the row of one expert server, to kill, pause and resume it."""

    def __init__(self, name: str, operator: Operator, act: _Act) -> None:
        self._operator, self._act = operator, act
        self._server: Member | None = None
        self._paused = False
        self.element = ui.element("div").classes("actions")
        self.element.props["data-member"] = name
        with self.element:
            self._kill = Press("Kill", self._on_kill, subject=name, kind="danger", asks=True)
            self._pause = Press("Pause", self._on_pause, subject=name, kind="plain", asks=True)

    def show(self, server: Member) -> None:
        """Enable the buttons that the server's state allows."""
        self._server = server
        alive, token = not server.state.is_gone, server.incarnation
        self._paused = server.host == _HOST and is_paused(server.pid)
        self._kill.show("Kill", asks=True, enabled=alive, token=token)
        # A paused server becomes DEAD and can still be resumed.
        verb, enabled = ("Resume", True) if self._paused else ("Pause", alive)
        self._pause.show(verb, asks=not self._paused, enabled=enabled, token=token)

    async def _on_kill(self, incarnation: object) -> None:
        await self._do("Kill", self._operator.kill, incarnation)

    async def _on_pause(self, incarnation: object) -> None:
        if self._paused:
            await self._do("Resume", self._operator.resume, incarnation)
        else:
            await self._do("Pause", self._operator.pause, incarnation)

    async def _do(self, verb: str, act: Callable[[Member], str], incarnation: object) -> None:
        server = self._server
        # The confirmation is for the incarnation that the browser showed.
        if server is not None and server.incarnation == incarnation:
            await self._act(f"{verb} {server.id}", lambda: act(server))
