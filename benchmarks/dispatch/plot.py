"""Plot of the exchange times and the floor, one panel per hidden size."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

__all__ = ["draw_plot"]

# Lines of a row: key, label, dashes. The floor has its own line.
_LINES = (("exchange_us", "exchange", "-"), ("layer_call_us", "layer call", "--"))


def draw_plot(document: dict[str, Any], path: Path) -> None:
    """Draw the document of `bench_dispatch` into a PNG: p50 as lines, p99 as shades."""
    figures = importlib.import_module("matplotlib.figure")
    rows = document["rows"]
    sizes = list(dict.fromkeys(row["hidden"] for row in rows))
    transports = list(dict.fromkeys(row["transport"] for row in rows))
    figure = figures.Figure(figsize=(6.4 * len(sizes) + 1.8, 5.2), layout="constrained")
    panels = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
    for panel, hidden in zip(panels, sizes, strict=True):
        here = [row for row in rows if row["hidden"] == hidden]
        for number, transport in enumerate(transports):
            of = [row for row in here if row["transport"] == transport]
            for key, word, dashes in _LINES:
                _draw(panel, of, key, f"{transport} {word}", f"C{number}", dashes)
        first = [row for row in here if row["transport"] == here[0]["transport"]]
        _draw(panel, first, "floor_us", "floor (C)", "black", ":")
        tokens = sorted({row["tokens"] for row in here})
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(tokens, [str(value) for value in tokens])
        panel.set_xlabel("tokens")
        panel.set_title(f"hidden {hidden}, bfloat16, top-{document['settings']['top_k']}")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("microseconds, p50 to p99")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    machine = document["machine"]
    figure.suptitle(f"{machine['processor']}, {machine['cores']} cores", fontsize="medium")
    figure.savefig(path, dpi=130)


def _draw(
    panel: Any, rows: list[dict[str, Any]], key: str, label: str, color: str, dashes: str
) -> None:
    if not rows:
        return
    tokens = [row["tokens"] for row in rows]
    p50 = [row[key]["p50"] for row in rows]
    panel.plot(tokens, p50, color=color, linestyle=dashes, marker="o", markersize=4, label=label)
    panel.fill_between(tokens, p50, [row[key]["p99"] for row in rows], color=color, alpha=0.12)
