"""Tables of a document's figures. A column or a line is named as in the JSON; `a.b` is b in a."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eaas_cli.console import print_table

__all__ = ["print_figures", "print_rows"]


def print_rows(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = (), title: str | None = None
) -> None:
    """Print a line for each row; `columns` are names or their beginnings, all without it."""
    flat = [dict(_flat(row, "")) for row in rows]
    names = [
        name
        for name in dict.fromkeys(name for row in flat for name in row)
        if not columns or any(name == c or name.startswith(f"{c}.") for c in columns)
    ]
    lines = [[_cell(row[name]) if name in row else "" for name in names] for row in flat]
    print_table(names, lines, title=title)


def print_figures(document: Mapping[str, Any]) -> None:
    """Print a line for each figure that is no list."""
    print_table(("", ""), [(name, _cell(value)) for name, value in _flat(document, "")])


def _flat(document: Mapping[str, Any], within: str) -> Iterator[tuple[str, Any]]:
    for name, value in document.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{within}{name}.")
        elif not isinstance(value, list):
            yield f"{within}{name}", value


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        # Without an exponent, so that a column can be compared at a glance.
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)
