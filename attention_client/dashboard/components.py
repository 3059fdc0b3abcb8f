"""The page's own elements. Whatever they show is handed over as data: none of them takes markup."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nicegui.element import Element
from nicegui.elements.mixins.value_element import ValueElement
from nicegui.events import GenericEventArguments

from attention_client.dashboard.nodes import encode

__all__ = ["Choice", "Drawn", "Press", "Section", "TextField"]


class Drawn(Element, component="drawn.js"):
    """What `nodes.encode` has written, as elements.

    Args:
        drawing: Its JSON.
        tag: Of the element around it.
    """

    def __init__(self, drawing: str = encode(), tag: str = "div") -> None:
        super().__init__()
        self.props["tag"] = tag
        self.props["drawing"] = drawing

    def show(self, drawing: str) -> None:
        """Show another one."""
        _set(self, "drawing", drawing)

    def scrolls(self, label: str) -> None:
        """Scroll what is long, also by the keyboard."""
        self.classes("scroll")
        self.props["tabindex"] = "0"
        self.props["role"] = "region"
        self.props["aria-label"] = label


class Press(Element, component="press.js"):
    """A button.

    Args:
        verb: What it does.
        on_press: Called with the `token` that the browser showed.
        subject: To what, where that is not plain.
        label: For screen readers, where verb and subject do not say it.
        kind: "main", "plain" or "danger".
        asks: A second press has to confirm the first one.
    """

    def __init__(
        self,
        verb: str,
        on_press: Callable[[Any], Any],
        *,
        subject: str = "",
        label: str = "",
        kind: str = "main",
        asks: bool = False,
    ) -> None:
        super().__init__()
        self.props["subject"] = subject
        self.props["label"] = label
        self.props["kind"] = kind
        self.show(verb, asks=asks)

        def press(event: GenericEventArguments) -> Any:
            return on_press(event.args)

        self.on("press", press)

    def show(self, verb: str, *, asks: bool = False, enabled: bool = True, token: int = 0) -> None:
        """Have it do something else, or nothing for now; `token` says to which life of the subject."""
        _set(self, "verb", verb)
        _set(self, "asks", asks)
        _set(self, "disabled", not enabled)
        _set(self, "token", token)


class Section(Element, component="section.js"):
    """A part of the page under a heading; its body is what is made within.

    Args:
        name: Its id.
        title: Of the heading.
        size: How wide it is: "whole", "most" or "less"; else half.
        folds: It can be closed, and is at first where the screen is narrow.
    """

    def __init__(self, name: str, title: str, *, size: str = "", folds: bool = False) -> None:
        super().__init__()
        self.props["id"] = self.props["name"] = name
        self.props["title"] = title
        self.props["size"] = size
        self.props["folds"] = folds


class TextField(ValueElement[str]):
    """A line of text. `ui.input` and `ui.select` compile a template, which the page's policy forbids."""

    LOOPBACK = False

    def __init__(self, label: str, value: str) -> None:
        super().__init__(tag="q-input", value=value)
        self.props["label"] = label
        self.props["for"] = self.html_id
        self.props("outlined dense")


class Choice(ValueElement[int]):
    """One of some numbers, 0 to `count` - 1."""

    def __init__(self, label: str, on_change: Callable[[], None]) -> None:
        super().__init__(tag="q-select", value=0, on_value_change=on_change)
        self.props["label"] = label
        self.props["for"] = self.html_id
        self.props["options"] = [0]
        self.props("outlined dense options-dense")

    def offer(self, count: int) -> None:
        """Let one of so many be chosen."""
        if len(self.props["options"]) != count:
            self.props["options"] = list(range(count))


def _set(element: Element, name: str, value: object) -> None:
    # Also what is the same would be sent to the browser.
    if element.props.get(name) != value:
        element.props[name] = value
