"""The dashboard's own NiceGUI elements. They take text as data and never parse it as markup."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nicegui.element import Element
from nicegui.elements.mixins.value_element import ValueElement

from attention_client.serving.dashboard.nodes import encode

__all__ = ["Choice", "Drawn", "Press", "Section", "TextField"]


class Drawn(Element, component="drawn.js"):
    """Element that shows a drawing, the output of `nodes.encode`."""

    def __init__(self, drawing: str = encode(), tag: str = "div") -> None:
        super().__init__()
        self.props.update(tag=tag, drawing=drawing)

    def show(self, drawing: str) -> None:
        """Replace the drawing in the viewer's browser; an unchanged one is not sent again."""
        _set(self, "drawing", drawing)

    def scrolls(self, label: str) -> None:
        """Make the element scrollable, also by keyboard."""
        self.classes("scroll")
        self.props.update({"tabindex": "0", "role": "region", "aria-label": label})


class Press(Element, component="press.js"):
    """A button of the dashboard's page.

    Args:
        verb: The action.
        on_press: Called with the `token` that the browser showed.
        subject: The object of the action, for the tooltip and screen readers, if the verb alone is not clear.
        kind: "main", "plain" or "danger".
        asks: Whether a second press must confirm the first one.
    """

    def __init__(
        self,
        verb: str,
        on_press: Callable[[Any], Any],
        *,
        subject: str = "",
        kind: str = "main",
        asks: bool = False,
    ) -> None:
        super().__init__()
        self.props.update(subject=subject, kind=kind)
        self.show(verb, asks=asks)
        self.on("press", lambda event: on_press(event.args))

    def show(self, verb: str, *, asks: bool = False, enabled: bool = True, token: int = 0) -> None:
        """Change, enable or disable the button's action. `token` is the incarnation of the subject."""
        _set(self, "verb", verb)
        _set(self, "asks", asks)
        _set(self, "disabled", not enabled)
        _set(self, "token", token)


class Section(Element, component="section.js"):
    """A part of the dashboard's page with a heading.

    Args:
        name: Its id.
        title: Text of the heading.
        size: Width: "whole", "most" or "less"; otherwise half.
        folds: Whether it can be folded; it then starts folded on a narrow screen.
    """

    def __init__(self, name: str, title: str, *, size: str = "", folds: bool = False) -> None:
        super().__init__()
        self.props.update(id=name, name=name, title=title, size=size, folds=folds)


class TextField(ValueElement[str]):
    """A text field. `ui.input` and `ui.select` compile a template, which the page's policy forbids."""

    LOOPBACK = False

    def __init__(self, label: str, value: str) -> None:
        super().__init__(tag="q-input", value=value)
        self.props.update({"label": label, "for": self.html_id})
        self.props("outlined dense")


class Choice(ValueElement[int]):
    """A drop-down list of the numbers 0 to `count` - 1: on the page, the MoE layers."""

    def __init__(self, label: str, on_change: Callable[[], None]) -> None:
        super().__init__(tag="q-select", value=0, on_value_change=on_change)
        self.props.update({"label": label, "for": self.html_id, "options": [0]})
        self.props("outlined dense options-dense")

    def offer(self, count: int) -> None:
        """Set the numbers of the list to those below `count`."""
        if len(self.props["options"]) != count:
            self.props["options"] = list(range(count))


def _set(element: Element, name: str, value: object) -> None:
    # NiceGUI would also send an unchanged value to the browser.
    if element.props.get(name) != value:
        element.props[name] = value
