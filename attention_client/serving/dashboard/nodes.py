"""The page's tree of elements: the only way for text of members to reach the page.

A tree travels as JSON; `drawn.js` turns it into elements. Text becomes a text node and a value becomes an
attribute value. Neither is parsed as markup, here or in the browser.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Child", "Node", "encode", "h"]

_TAGS = {
    "a", "bdi", "caption", "code", "dd", "details", "div", "dl", "dt", "figcaption", "figure", "h1", "img",
    "li", "line", "ol", "p", "polyline", "slot", "small", "span", "strong", "summary", "svg", "table",
    "tbody", "td", "th", "thead", "time", "tr",
}  # fmt: skip
# Python names to DOM names. None of these attributes runs a script.
_ATTRIBUTES = {
    name: name.rstrip("_").replace("_", "-")
    for name in (
        "alt", "aria_hidden", "aria_label", "class_", "data_member", "data_servers", "height", "href", "key",
        "points", "preserveAspectRatio", "role", "scope", "src", "title", "viewBox", "x1", "x2", "y1", "y2",
    )
}  # fmt: skip
# Links lead to parts of this page; images are embedded in the page.
_ADDRESSES = {"href": "#", "src": "data:image/png;base64,"}


@dataclass(frozen=True, slots=True)
class Node:
    """An HTML or SVG element of the dashboard's page.

    Attributes:
        tag: Its tag.
        attributes: Values by DOM name; "key" identifies an element among its siblings and is not rendered.
        children: Text and elements, in order.
    """

    tag: str
    attributes: Mapping[str, str] = field(default_factory=dict)
    children: tuple[Child, ...] = ()

    @property
    def text(self) -> str:
        """All text of the element, joined by spaces; for tests."""
        return " ".join(c if isinstance(c, str) else c.text for c in self.children)


Child = str | Node


def h(tag: str, *children: Child, **attributes: object) -> Node:
    """Make an element. In an attribute's name a trailing underscore is dropped; others become hyphens.

    Raises:
        ValueError: The tag or an attribute is not allowed, or an address leads elsewhere.
    """
    if tag not in _TAGS or not attributes.keys() <= _ATTRIBUTES.keys():
        raise ValueError(f"not drawn here: <{tag}> with {sorted(attributes)}")
    values = {_ATTRIBUTES[name]: str(value) for name, value in attributes.items()}
    for name, start in _ADDRESSES.items():
        if name in values and not values[name].startswith(start):
            raise ValueError(f"{name} does not begin with {start}: {values[name][:80]}")
    return Node(tag, values, children)


def encode(*nodes: Child) -> str:
    """Encode elements as the JSON that `drawn.js` reads: text, or [tag, attributes, children]."""
    return json.dumps(nodes, default=_parts, separators=(",", ":"))


def _parts(node: Node) -> list[object]:
    return [node.tag, node.attributes, node.children]
