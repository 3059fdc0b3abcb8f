"""Small parts that sections are made of. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from attention_client.dashboard.nodes import Child, Node, h

__all__ = ["ago", "badge", "cell", "empty", "or_none", "row", "table"]


_LONG_AGO_S = 120


def table(
    caption: str, head: Iterable[str], rows: Iterable[Node], wide: Collection[str] = ()
) -> Node:
    """A table with a caption for screen readers; `wide` ones of its columns are for wide screens."""
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
    """A row of a table, which its name tells from the others."""
    return h("tr", h("th", name, scope="row"), *cells, key=name)


def cell(text: Child, *, number: bool = False, wide: bool = False) -> Node:
    """A cell of a table."""
    kinds = ("number",) * number + ("wide",) * wide
    return h("td", text, class_=" ".join(kinds))


def badge(state: str) -> Node:
    """A cell with a member's state."""
    return cell(h("span", state, class_=f"state {state.lower()}"))


def empty(sentence: str) -> list[Node]:
    """In place of what is not there."""
    return [h("p", sentence, class_="empty")]


def or_none(value: float | None, form: str = "{:.2f}", factor: float = 1.0) -> str:
    """A number, times a factor, in a form; a dash where it is not known."""
    return "—" if value is None else form.format(value * factor)


def ago(seconds: float) -> str:
    """How long ago something was."""
    if seconds < _LONG_AGO_S:
        return f"{seconds:.0f} s ago"
    return f"{seconds / 60:.0f} min ago"
