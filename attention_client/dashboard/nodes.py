"""What the page draws, as a tree of elements: the one way by which text of members reaches the page.

A tree travels as JSON and `drawn.js` makes elements of it. Text becomes a text node and a value an
attribute's value; neither is parsed as markup, here or in the browser.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Child", "Node", "encode", "h"]

_TAGS = {
    *("a", "bdi", "caption", "code", "dd", "details", "div", "dl", "dt", "figcaption", "figure"),
    *(
        "h1",
        "img",
        "li",
        "line",
        "ol",
        "p",
        "polyline",
        "small",
        "span",
        "strong",
        "summary",
        "svg",
    ),
    *("table", "tbody", "td", "th", "thead", "time", "tr"),
}
# As Python names them, and as the DOM does. None of them runs a script.
_ATTRIBUTES = {
    name: name.rstrip("_").replace("_", "-")
    for name in (
        *("alt", "aria_hidden", "aria_label", "class_", "data_servers", "height", "href", "key"),
        *("points", "preserveAspectRatio", "role", "scope", "src", "title", "viewBox"),
        *("x1", "x2", "y1", "y2"),
    )
}
# An address leads nowhere but to this page's parts and to pictures in the page itself.
_ADDRESSES = {"href": "#", "src": "data:image/png;base64,"}


@dataclass(frozen=True, slots=True)
class Node:
    """An element of the page.

    Attributes:
        tag: Its kind.
        attributes: By their names in the DOM; "key" tells siblings apart and is not shown.
        children: Text and elements, in order.
    """

    tag: str
    attributes: Mapping[str, str] = field(default_factory=dict)
    children: tuple[Child, ...] = ()

    @property
    def text(self) -> str:
        """All text in it, its parts separated by spaces."""
        return " ".join(c if isinstance(c, str) else c.text for c in self.children)


Child = str | Node


def h(tag: str, *children: Child, **attributes: object) -> Node:
    """An element. A trailing underscore of an attribute's name is dropped, others become hyphens.

    Raises:
        ValueError: The tag or an attribute is not one that pages here are made of, or an address leads
            elsewhere.
    """
    if tag not in _TAGS or not attributes.keys() <= _ATTRIBUTES.keys():
        raise ValueError(f"not drawn here: <{tag}> with {sorted(attributes)}")
    values = {_ATTRIBUTES[name]: str(value) for name, value in attributes.items()}
    for name, start in _ADDRESSES.items():
        if name in values and not values[name].startswith(start):
            raise ValueError(f"{name} does not begin with {start}: {values[name][:80]}")
    return Node(tag, values, children)


def encode(*nodes: Child) -> str:
    """The JSON that `drawn.js` reads: text, or [tag, attributes, children]."""
    return json.dumps(nodes, default=_parts, separators=(",", ":"))


def _parts(node: Node) -> list[object]:
    return [node.tag, node.attributes, node.children]
