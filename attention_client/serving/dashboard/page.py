"""One viewer's page: the broadcaster's sections, the chat box and the operator's buttons."""

from __future__ import annotations

from nicegui import Client, ui

from attention_client.serving.dashboard.broadcaster import Broadcaster
from attention_client.serving.dashboard.chat import ChatBox
from attention_client.serving.dashboard.chat_client import ChatClient
from attention_client.serving.dashboard.components import Choice, Drawn, Section
from attention_client.serving.dashboard.controls import Controls
from attention_client.serving.dashboard.nodes import encode, h
from attention_client.serving.dashboard.operator import Operator
from eaas.types import Role

__all__ = ["build_page"]


def build_page(
    client: Client,
    name: str,
    broadcaster: Broadcaster,
    chat_client: ChatClient,
    operator: Operator | None,
) -> None:
    """Fill the page of a client. While the client is connected, the page is updated once a second.

    Args:
        client: The viewer.
        name: The model's name.
        broadcaster: Draws the sections.
        chat_client: Sends chat requests.
        operator: Runs the actions of the buttons; None: no buttons.
    """
    Drawn(encode(h("a", "Skip to the chat", class_="skip", href="#chat")))
    title = h("h1", "Expert-as-a-Service ", h("small", "serving ", h("bdi", name)))
    Drawn(encode(title))
    page = _Page(broadcaster, chat_client, operator)
    client.on_connect(lambda: broadcaster.join(client.id, page.show))
    client.on_disconnect(lambda: broadcaster.leave(client.id))

    def gone() -> None:
        broadcaster.leave(client.id)
        page.end()

    client.on_delete(gone)


class _Page:
    def __init__(
        self, broadcaster: Broadcaster, chat_client: ChatClient, operator: Operator | None
    ) -> None:
        self._broadcaster = broadcaster
        self._drawn: dict[str, Drawn] = {}
        self._controls: Controls | None = None
        self._draws("alerts").props('id="alerts" role="alert"')
        self._draws("summary")
        with ui.element("div").classes("grid"):
            with Section("chat", "Chat", size="most" if operator else "whole"):
                self._chat = ChatBox(chat_client, self._servers)
            if operator is not None:
                with Section("operate", "Operate", size="less"):
                    self._controls = Controls(operator, broadcaster)
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
        """The viewer has left."""
        self._chat.end()

    def show(self) -> None:
        """Send the changes to the browser."""
        placement = self._broadcaster.snapshot.placement
        if placement is not None:
            self._layer.offer(placement.holds_LSE.shape[0])
        layer = self._broadcaster.placement(int(self._layer.value or 0))
        for name, drawing in (self._broadcaster.sections | {"placement": layer}).items():
            self._drawn[name].show(drawing)
        if self._controls is not None:
            self._controls.show()

    def _draws(self, name: str) -> Drawn:
        drawn = self._drawn[name] = Drawn()
        drawn.props["data-part"] = name
        return drawn

    def _servers(self) -> list[str]:
        return [m.id for m in self._broadcaster.snapshot.live(Role.EXPERT_SERVER)]
