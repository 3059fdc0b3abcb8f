"""One viewer's page: what the hub has drawn, the chat box, and in demo mode the operator's buttons."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

from nicegui import Client, ui

from attention_client.dashboard.chat import ChatBox
from attention_client.dashboard.hub import Hub
from attention_client.dashboard.operator import MOST_SERVERS, Operator, is_stopped
from attention_client.dashboard.talk import Talk
from eaas.errors import EaasError
from eaas.types import Member, MemberState, Role

__all__ = ["PageParts", "build_page"]


@dataclass(frozen=True)
class PageParts:
    """What every viewer's page is made of.

    Attributes:
        name: Of the model.
        hub: Draws.
        talk: Answers.
        operator: What buttons do.
    """

    name: str
    hub: Hub
    talk: Talk
    operator: Operator


def build_page(client: Client, parts: PageParts, *, buttons: bool) -> None:
    """Fill the page of a client. It is drawn anew once a second from its first connection to its last."""
    ui.html('<a class="skip" href="#chat">Skip to the chat</a>', sanitize=False)
    ui.html(
        f"<h1>Expert-as-a-Service <small>serving {escape(parts.name)}</small></h1>", sanitize=False
    )
    page = _Page(parts, buttons)
    client.on_connect(lambda: parts.hub.join(client.id, page.show))
    client.on_disconnect(lambda: parts.hub.leave(client.id))

    def gone() -> None:
        parts.hub.leave(client.id)
        page.end()

    client.on_delete(gone)


class _Page:
    def __init__(self, parts: PageParts, buttons: bool) -> None:
        self._parts, self._hub = parts, parts.hub
        self._shown: dict[str, str] = {}
        self._html: dict[str, ui.html] = {}
        self._operated: tuple[tuple[str, int, bool], ...] | None = None
        self._section("alerts", role='role="alert"')
        self._section("summary")
        with ui.element("div").classes("grid"):
            with _card("chat", "Chat", "whole" if not buttons else "most"):
                self._chat = ChatBox(parts.talk, self._servers)
            if buttons:
                with _card("operate", "Operate", "less"):
                    self._operate()
            with _card("members", "Members", "most"):
                self._section("members", scroll="Members")
            with _card("events", "Time line", "less"):
                self._section("events", scroll="Time line")
            with _card("load", "Load: layers by servers"):
                self._section("load")
            with _card("placement", "Placement: experts by servers"):
                self._layer = (
                    ui.select([0], value=0, label="MoE layer", on_change=self.show)
                    .props("outlined dense options-dense")
                    .style("width: 9em; margin-bottom: 8px")
                )
                self._section("placement")
            with _card("curves", "Balance and speed", "whole"):
                self._section("curves")
            with _card("decisions", "Decisions of the balancer", "whole"):
                self._section("decisions", scroll="Decisions")
        self.show()

    def end(self) -> None:
        """The viewer is gone."""
        self._chat.end()

    def show(self) -> None:
        """Send the browser what has changed."""
        placement = self._hub.facts.placement
        if placement is not None and len(self._layer.options) != placement.holds_LSE.shape[0]:
            self._layer.set_options(list(range(placement.holds_LSE.shape[0])))
        sections = self._hub.sections | {
            "placement": self._hub.placement(int(self._layer.value or 0))
        }
        for name, drawn in sections.items():
            if self._shown.get(name) != drawn:
                self._shown[name] = drawn
                self._html[name].set_content(drawn)
        if self._operated is not None:
            self._show_servers()

    def _section(self, name: str, role: str = "", scroll: str = "") -> None:
        part = ui.html("", sanitize=False).props(f'data-part="{name}" {role}')
        if scroll:
            # Who has no mouse scrolls it by the keyboard.
            part.classes("scroll").props(f'tabindex="0" role="region" aria-label="{scroll}"')
        self._html[name] = part

    # -- the operator's buttons ------------------------------------------------------------------------

    def _operate(self) -> None:
        operator, hub = self._parts.operator, self._hub
        with ui.element("div").classes("row-of-buttons"):
            self._button(
                "Start a server", lambda: operator.start_server(hub.facts), "Start an expert server"
            )
            self._button("Rebalance", lambda: operator.rebalance(hub.facts), "Rebalance now")
        with ui.element("div").classes("row-of-buttons"):
            # How many there are, once that is known: who then presses the button changes nothing.
            self._number = number = (
                ui.number("Servers", value=None, min=1, max=MOST_SERVERS, precision=0)
                .props("outlined dense")
                .style("width: 7em")
            )
            self._button(
                "Scale",
                lambda: operator.scale(hub.facts, number.value),
                "Scale to that number of servers",
            )
        self._rows = ui.element("div").classes("scroll").props('data-part="operate-servers"')
        self._said = ui.label("").classes("note").props('role="status" data-part="operate-said"')
        self._operated = ()

    def _show_servers(self) -> None:
        found = [m.member for m in self._hub.facts.members if m.member.role is Role.EXPERT_SERVER]
        stopped = [is_stopped(m.pid) for m in found]
        # One that stands still is DEAD after a while, and can go on.
        live = [
            (m, still)
            for m, still in zip(found, stopped, strict=True)
            if still or m.state is not MemberState.DEAD
        ]
        shown = tuple((m.id, m.pid, still) for m, still in live)
        if shown == self._operated:
            return
        if not self._operated and self._number.value is None:
            self._number.set_value(len(live))
        self._operated = shown
        self._rows.clear()
        with self._rows:
            for member, still in live:
                self._server_row(member, still)

    def _server_row(self, member: Member, stopped: bool) -> None:
        operator = self._parts.operator
        with ui.element("div").classes("row-of-buttons"):
            ui.html(escape(member.id), sanitize=False, tag="strong")
            self._button("Kill", lambda: operator.kill(member), f"Kill {member.id}", "negative")
            if stopped:
                self._button("Continue", lambda: operator.resume(member), f"Continue {member.id}")
            else:
                self._button("Stop", lambda: operator.stop(member), f"Stop {member.id}")

    def _button(
        self, text: str, act: Callable[[], str], label: str, colour: str = "primary"
    ) -> None:
        async def click() -> None:
            self._said.set_text(f"{label} …")
            try:
                said = await asyncio.get_running_loop().run_in_executor(None, act)
            except EaasError as error:
                said = str(error)
            self._said.set_text(said)

        ui.button(text, on_click=click, color=colour).props(
            f'no-caps dense unelevated padding="2px 10px" aria-label="{escape(label)}"'
        )

    def _servers(self) -> list[str]:
        return [m.id for m in self._hub.facts.live(Role.EXPERT_SERVER)]


def _card(name: str, title: str, size: str = "") -> ui.element:
    card = ui.element("section").classes(f"card {size}").props(f'id="{name}" aria-label="{title}"')
    with card:
        ui.html(title, sanitize=False, tag="h2")
    return card
