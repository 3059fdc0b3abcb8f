"""The operator's buttons on one viewer's page."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

from nicegui import ui

from attention_client.dashboard.components import Press
from attention_client.dashboard.hub import Hub
from attention_client.dashboard.operator import Operator, is_paused
from eaas.errors import EaasError
from eaas.types import Member, Role

__all__ = ["Controls"]

# Rows of servers that are gone. Each keeps its place: nothing moves below the pointer.
_MOST_GONE = 16
_HOST = socket.gethostname()

_Act = Callable[[str, Callable[[], str]], Awaitable[None]]


class Controls:
    """Made within a page.

    Args:
        operator: What buttons do.
        hub: Knows the servers.
    """

    def __init__(self, operator: Operator, hub: Hub) -> None:
        self._operator, self._hub = operator, hub
        self._rows: dict[str, _Row] = {}
        with ui.element("div").classes("row-of-buttons"):
            self._button("Start an expert server", lambda: operator.start_server(hub.facts))
            self._button("Rebalance now", lambda: operator.rebalance(hub.facts), kind="plain")
        with ui.element("div").classes("row-of-buttons"):
            # How many there are, once that is known: to press the button without a thought changes nothing.
            self._number = number = ui.number("Servers", value=None, min=1, precision=0)
            number.props("outlined dense").classes("short")
            self._button(
                "Scale",
                lambda: operator.scale(hub.facts, number.value),
                label="Scale to that number of servers",
            )
        self._servers = ui.element("div").classes("servers scroll")
        self._servers.props('data-part="operate-servers"')
        self._said = ui.label("").classes("note").props('role="status" data-part="operate-said"')

    def show(self) -> None:
        """Show the servers as they are now. A new one comes last; the others stay where they are."""
        servers = [m.member for m in self._hub.facts.members if m.member.role is Role.EXPERT_SERVER]
        for server in servers:
            if server.id not in self._rows:
                with self._servers:
                    self._rows[server.id] = _Row(server.id, self._operator, self._act)
            self._rows[server.id].show(server)
        gone = [name for name in self._rows if name not in {s.id for s in servers}]
        for name in gone:
            self._rows[name].show(None)
        for name in gone[: max(0, len(gone) - _MOST_GONE)]:
            self._rows.pop(name).delete()
        if self._number.value is None and servers:
            self._number.set_value(len(self._hub.facts.live(Role.EXPERT_SERVER)))

    def _button(
        self, verb: str, act: Callable[[], str], *, label: str = "", kind: str = "main"
    ) -> None:
        async def press(_token: object) -> None:
            await self._act(label or verb, act)

        Press(verb, press, label=label, kind=kind)

    async def _act(self, what: str, act: Callable[[], str]) -> None:
        self._said.set_text(f"{what} …")
        try:
            said = await asyncio.get_running_loop().run_in_executor(None, act)
        except EaasError as error:
            said = str(error)
        self._said.set_text(said)


class _Row:
    """The buttons of one server."""

    def __init__(self, name: str, operator: Operator, act: _Act) -> None:
        self._name, self._operator, self._act = name, operator, act
        self._server: Member | None = None
        self._paused = False
        self._row = ui.element("div").classes("server")
        with self._row:
            self._kill = Press("Kill", self._on_kill, subject=name, kind="danger", asks=True)
            self._pause = Press("Pause", self._on_pause, subject=name, kind="plain", asks=True)

    def show(self, server: Member | None) -> None:
        """Show what can be done to the server; None: it is gone."""
        self._server = server
        alive = server is not None and not server.state.is_gone
        life = server.incarnation if server is not None else 0
        self._paused = server is not None and server.host == _HOST and is_paused(server.pid)
        self._kill.show("Kill", asks=True, enabled=alive, token=life)
        # One that is paused is DEAD after a while, and can go on.
        verb, able = ("Resume", True) if self._paused else ("Pause", alive)
        self._pause.show(verb, asks=not self._paused, enabled=able, token=life)

    def delete(self) -> None:
        """Take the row off the page."""
        self._row.delete()

    async def _on_kill(self, life: object) -> None:
        await self._do("Kill", self._operator.kill, life)

    async def _on_pause(self, life: object) -> None:
        if self._paused:
            await self._do("Resume", self._operator.resume, life)
        else:
            await self._do("Pause", self._operator.pause, life)

    async def _do(self, verb: str, act: Callable[[Member], str], life: object) -> None:
        server = self._server
        # What was confirmed is meant for the life that the browser showed.
        if server is not None and server.incarnation == life:
            await self._act(f"{verb} {server.id}", lambda: act(server))
