"""Prints and draws the document of `eaas bench experts` when the run has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eaas_cli.console import print_figures, print_rows
from eaas_cli.plot import Line, draw_plot

__all__ = ["draw", "print_report"]

_COLUMNS = (
    "dtype",
    "tokens",
    "kernel",
    "auto",
    "ms",
    "roofline_fraction",
    "bound",
    "speedup",
    "rel_error",
)
# More cores than this, busy with other processes, disturb the figures.
_BUSY_CORES = 0.1


def print_report(document: dict[str, Any]) -> None:
    """Print the machine's limits, the rows of each layer, the tuned tile sizes, and what was skipped."""
    machine = document["machine"]
    print_figures(machine)
    if machine["busy_cores_elsewhere"] > _BUSY_CORES:
        print(
            f"Other processes kept {machine['busy_cores_elsewhere']} cores busy: "
            "measure again on an idle machine"
        )
    for shape in dict.fromkeys(row["shape"] for row in document["rows"]):
        rows = [row for row in document["rows"] if row["shape"] == shape]
        print_rows(rows, _COLUMNS, title=f"H,I,E,K = {shape}")
    print(
        "H,I,E,K: hidden and intermediate size, experts, experts per token; roofline fraction: of the "
        "machine's limit at that moment; auto: whether servers pick it; speedup: over each baseline"
    )
    for name in ("tuned", "skipped"):
        if document.get(name):
            print_rows(document[name], title=name)


def draw(document: dict[str, Any], path: Path) -> None:
    """Draw the fractions of the limits: a panel for each shape, a line for each kernel and dtype."""
    panels: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    for row in document["rows"]:
        lines = panels.setdefault(f"H,I,E,K = {row['shape']}", {})
        x, y = lines.setdefault(f"{row['kernel']} {row['dtype']}", ([], []))
        x.append(row["tokens"])
        y.append(row["roofline_fraction"])
    draw_plot(
        path,
        {
            title: [Line(label, *xy) for label, xy in lines.items()]
            for title, lines in panels.items()
        },
        "tokens",
        "fraction of the roofline",
        limit=1.0,
        ticks=sorted({row["tokens"] for row in document["rows"]}),
    )
