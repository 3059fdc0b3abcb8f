"""Tables and texts for the dashboard's sections. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from attention_client.serving.dashboard.nodes import Child, Node, h

__all__ = ["ago", "badge", "cell", "empty", "or_none", "row", "table"]


_LONG_AGO_S = 120


def table(
    caption: str, head: Iterable[str], rows: Iterable[Node], wide: Collection[str] = ()
) -> Node:
    """Make a table with a caption for screen readers. Narrow screens hide the columns in `wide`."""
    columns = [
        h("th", name, scope="col", class_="wide" if name in wide else "narrow") for name in head
    ]
    return h(
        "table",
        h("caption", caption, class_="unseen"),
        h("thead", h("tr", *columns)),
        h("tbody", *rows),
    )


def row(name: str, *cells: Node) -> Node:
    """Make a row of a section's table; its name is the first cell and identifies it between updates."""
    return h("tr", h("th", name, scope="row"), *cells, key=name)


def cell(text: Child, *, number: bool = False, wide: bool = False) -> Node:
    """Make a cell of a section's table. Narrow screens hide a `wide` one."""
    kinds = ("number",) * number + ("wide",) * wide
    return h("td", text, class_=" ".join(kinds))


def badge(state: str) -> Node:
    """Make a table cell with a member's state, coloured by that state."""
    return cell(h("span", state, class_=f"state {state.lower()}"))


def empty(sentence: str) -> list[Node]:
    """Make a section's whole content, one sentence, in place of missing data."""
    return [h("p", sentence, class_="empty")]


def or_none(value: float | None, form: str = "{:.2f}", factor: float = 1.0) -> str:
    """Format a number times a factor; a dash for None, which is an unknown value."""
    return "—" if value is None else form.format(value * factor)


def ago(seconds: float) -> str:
    """Format an age in seconds as "5 s ago" or "3 min ago", for the page's time line and charts."""
    if seconds < _LONG_AGO_S:
        return f"{seconds:.0f} s ago"
    return f"{seconds / 60:.0f} min ago"
