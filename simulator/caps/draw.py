"""Plots a simulated comparison of batch-selection strategies: latency by rate, and their gains."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from simulator.caps.grid import BASELINE
from simulator.caps.workload import PATTERNS

__all__ = ["can_draw", "draw_comparison"]

_GAINS = (
    ("p99_reduction_pct", "P99 reduction, %"),
    ("throughput_gain_pct", "throughput gain, %"),
    ("imbalance_reduction_pct", "imbalance reduction, %"),
)


def can_draw() -> bool:
    """Whether matplotlib, an extra, is installed; without it `eaas simulate caps` writes no plots."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_comparison(document: dict[str, Any], directory: Path) -> list[Path]:
    """Write `p99` and `gains` as .pdf and .png into an existing directory; return the files' paths.

    Args:
        document: Result of `compare`.
        directory: Directory for the files.
    """
    figures = importlib.import_module("matplotlib.figure")
    patterns = [pattern for pattern in PATTERNS if pattern in document]
    written: list[Path] = []
    latency = figures.Figure(figsize=(5.6 * len(patterns) + 1.8, 4.8), layout="constrained")
    panels = latency.subplots(1, len(patterns), squeeze=False)[0]
    for panel, pattern in zip(panels, patterns, strict=True):
        _draw_latency(panel, document, pattern)
    panels[0].set_ylabel("P99 latency, ms")
    handles, labels = panels[0].get_legend_handles_labels()
    latency.legend(handles, labels, loc="outside right center", frameon=False)
    written += _save(latency, directory / "p99")
    gains = figures.Figure(
        figsize=(4.4 * len(_GAINS) + 1.8, 4.4 * len(patterns)), layout="constrained"
    )
    rows = gains.subplots(len(patterns), len(_GAINS), squeeze=False)
    for row, pattern in zip(rows, patterns, strict=True):
        for panel, (key, label) in zip(row, _GAINS, strict=True):
            _draw_gain(panel, document, pattern, key)
            panel.set_xlabel(label)
        row[0].set_title(f"{pattern}, against {BASELINE}", loc="left")
    handles, labels = rows[0][0].get_legend_handles_labels()
    gains.legend(handles, labels, loc="outside right center", frameon=False)
    return written + _save(gains, directory / "gains")


def _draw_latency(panel: Any, document: dict[str, Any], pattern: str) -> None:
    rates: Sequence[str] = list(document[pattern])
    at = [float(rate) for rate in rates]
    for number, name in enumerate(document["strategies"]):
        rows = [document[pattern][rate][name] for rate in rates]
        panel.errorbar(
            at,
            [row["p99_mean"] for row in rows],
            yerr=[row["p99_ci95"] or 0 for row in rows],
            label=name,
            color=f"C{number % 10}",
            linestyle="-" if number < 10 else "--",
            marker="o",
            markersize=3,
            capsize=2,
        )
    panel.set_title(pattern)
    panel.set_xlabel("requests/s; bars: 95 % confidence")
    panel.grid(alpha=0.3)


def _draw_gain(panel: Any, document: dict[str, Any], pattern: str, key: str) -> None:
    names = [name for name in document["strategies"] if name != BASELINE]
    rates = list(document[pattern])
    height = 0.8 / len(rates)
    for number, rate in enumerate(rates):
        gains = document[pattern][rate]["_improvements"]
        panel.barh(
            [place + number * height for place in range(len(names))],
            [gains[name][key] for name in names],
            height=height,
            color=f"C{number % 10}",
            label=f"{rate} req/s",
        )
    panel.set_yticks([place + 0.4 - height / 2 for place in range(len(names))], names)
    panel.axvline(0, color="black", linewidth=0.8)
    panel.grid(alpha=0.3, axis="x")


def _save(figure: Any, stem: Path) -> list[Path]:
    paths = [stem.with_suffix(suffix) for suffix in (".pdf", ".png")]
    for path in paths:
        figure.savefig(path, dpi=130)
    return paths
