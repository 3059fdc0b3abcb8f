"""One viewer's page of the dashboard: the shared sections, the chat box, the operator's buttons."""

from __future__ import annotations

import json
from typing import Any

from nicegui import Client, ui

from attention_client.serving.dashboard.broadcaster import Broadcaster
from attention_client.serving.dashboard.chat import ChatBox
from attention_client.serving.dashboard.chat_source import ChatSource
from attention_client.serving.dashboard.components import Choice, Drawn, Press, Section
from attention_client.serving.dashboard.controls import Controls
from attention_client.serving.dashboard.nodes import encode, h
from attention_client.serving.dashboard.operator import Operator
from eaas.types import Role

__all__ = ["build_page"]


def build_page(
    client: Client,
    name: str,
    broadcaster: Broadcaster,
    chat: ChatSource,
    operator: Operator | None,
) -> None:
    """Build the page that a browser asks for; it is updated once a second while its viewer is connected."""
    drawn: dict[str, Drawn] = {}
    controls: Controls | None = None
    dismissed: set[str] = set()

    def draws(name: str) -> Drawn:
        drawn[name] = Drawn()
        drawn[name].props["data-part"] = name
        return drawn[name]

    def alerts() -> list[Any]:
        """Return the alerts that are on the page; a dismissed one returns only after it has ended."""
        nodes = json.loads(broadcaster.sections["alerts"])
        dismissed.intersection_update(node[1]["key"] for node in nodes)
        return [node for node in nodes if node[1]["key"] not in dismissed]

    def dismiss(_: object) -> None:
        dismissed.update(node[1]["key"] for node in alerts())
        show()

    def show() -> None:
        """Send the newest drawings to the viewer's browser, after each poll or choice of an MoE layer."""
        placement = broadcaster.snapshot.placement
        if placement is not None:
            layer.offer(placement.shape[0])
        shown = broadcaster.placement(int(layer.value or 0))
        own = {"placement": shown, "alerts": encode(*alerts())}
        for section, drawing in (broadcaster.sections | own).items():
            drawn[section].show(drawing)
        if controls is not None:
            controls.show()

    page, banner = ui.element("main").classes("page"), ui.element("div").classes("banner")
    with banner:
        draws("alerts").props('id="alerts" role="alert"')
        Press("Dismiss", dismiss, subject="the alerts", kind="plain")
    with page:
        Drawn(encode(h("a", "Skip to the chat", class_="skip", href="#chat")))
        Drawn(encode(h("h1", "Expert-as-a-Service ", h("small", "serving ", h("bdi", name)))))
        draws("summary")
    with page, ui.element("div").classes("grid"):
        with Section("chat", "Chat", size="most" if operator else "whole"):
            box = ChatBox(
                chat, lambda: [m.id for m in broadcaster.snapshot.live(Role.EXPERT_SERVER)]
            )
        operate = Section("operate", "Operate", size="less") if operator is not None else None
        with Section("members", "Members", size="most"):
            draws("members").scrolls("Members")
        if operator is not None and operate is not None:
            with operate:
                controls = Controls(operator, broadcaster, drawn["members"])
        with Section("events", "Time line", size="less", folds=True):
            draws("events").scrolls("Time line")
        with Section("load", "Load: layers by servers", folds=True):
            draws("load")
        with Section("placement", "Placement: experts by servers", folds=True):
            layer = Choice("MoE layer", show).classes("short")
            draws("placement")
        with Section("curves", "Balance and speed", size="whole", folds=True):
            draws("curves")
        with Section("decisions", "Decisions of the balancer", size="whole", folds=True):
            draws("decisions").scrolls("Decisions")
    show()

    def gone() -> None:
        broadcaster.leave(client.id)
        box.end()

    client.on_connect(lambda: broadcaster.join(client.id, show))
    client.on_disconnect(lambda: broadcaster.leave(client.id))
    client.on_delete(gone)
