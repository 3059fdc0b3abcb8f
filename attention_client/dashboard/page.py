"""One viewer's page: what the hub has drawn, the chat box, and in demo mode the operator's buttons."""

from __future__ import annotations

from dataclasses import dataclass

from nicegui import Client, ui

from attention_client.dashboard.chat import ChatBox
from attention_client.dashboard.components import Choice, Drawn, Section
from attention_client.dashboard.controls import Controls
from attention_client.dashboard.hub import Hub
from attention_client.dashboard.nodes import encode, h
from attention_client.dashboard.operator import Operator
from attention_client.dashboard.talk import Talk
from eaas.types import Role

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
    Drawn(encode(h("a", "Skip to the chat", class_="skip", href="#chat")))
    title = h("h1", "Expert-as-a-Service ", h("small", "serving ", h("bdi", parts.name)))
    Drawn(encode(title))
    page = _Page(parts, buttons)
    client.on_connect(lambda: parts.hub.join(client.id, page.show))
    client.on_disconnect(lambda: parts.hub.leave(client.id))

    def gone() -> None:
        parts.hub.leave(client.id)
        page.end()

    client.on_delete(gone)


class _Page:
    def __init__(self, parts: PageParts, buttons: bool) -> None:
        self._hub = parts.hub
        self._drawn: dict[str, Drawn] = {}
        self._controls: Controls | None = None
        self._draws("alerts").props('id="alerts" role="alert"')
        self._draws("summary")
        with ui.element("div").classes("grid"):
            with Section("chat", "Chat", size="most" if buttons else "whole"):
                self._chat = ChatBox(parts.talk, self._servers)
            if buttons:
                with Section("operate", "Operate", size="less"):
                    self._controls = Controls(parts.operator, parts.hub)
            with Section("members", "Members", size="most"):
                self._draws("members").scrolls("Members")
            with Section("events", "Time line", size="less", folds=True):
                self._draws("events").scrolls("Time line")
            with Section("load", "Load: layers by servers", folds=True):
                self._draws("load")
            with Section("placement", "Placement: experts by servers", folds=True):
                self._layer = Choice("MoE layer", self.show).classes("short")
                self._draws("placement")
            with Section("curves", "Balance and speed", size="whole", folds=True):
                self._draws("curves")
            with Section("decisions", "Decisions of the balancer", size="whole", folds=True):
                self._draws("decisions").scrolls("Decisions")
        self.show()

    def end(self) -> None:
        """The viewer is gone."""
        self._chat.end()

    def show(self) -> None:
        """Send the browser what has changed."""
        placement = self._hub.facts.placement
        if placement is not None:
            self._layer.offer(placement.holds_LSE.shape[0])
        layer = self._hub.placement(int(self._layer.value or 0))
        for name, drawing in (self._hub.sections | {"placement": layer}).items():
            self._drawn[name].show(drawing)
        if self._controls is not None:
            self._controls.show()

    def _draws(self, name: str) -> Drawn:
        drawn = self._drawn[name] = Drawn()
        drawn.props["data-part"] = name
        return drawn

    def _servers(self) -> list[str]:
        return [m.id for m in self._hub.facts.live(Role.EXPERT_SERVER)]
