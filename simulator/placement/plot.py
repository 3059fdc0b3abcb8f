"""Plots PAR over time: a panel for each number of servers, a line for each policy."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np

from simulator.placement.compare import Comparison
from simulator.placement.replay import Replay

__all__ = ["draw_plot"]

# Points of a line, about the picture's width in pixels.
_POINTS = 384


def draw_plot(comparison: Comparison, path: Path) -> None:
    """Write the plot of a comparison's PAR over time as PNG, for `eaas trace compare`; needs matplotlib."""
    figures = importlib.import_module("matplotlib.figure")
    counts = list(dict.fromkeys(run.servers for run in comparison.replays))
    labels = list(dict.fromkeys(map(_label, comparison.replays)))
    figure = figures.Figure(figsize=(9, 3.2 * len(counts) + 0.6), layout="constrained")
    panels = figure.subplots(len(counts), 1, sharex=True, squeeze=False)[:, 0]
    for panel, servers in zip(panels, counts, strict=True):
        for run in comparison.replays:
            if run.servers == servers:
                _draw(panel, run, f"C{labels.index(_label(run))}")
        panel.axhline(1.0, color="black", linewidth=1)
        panel.set_title(f"{servers} servers")
        panel.set_ylabel("PAR, mean of layers")
        panel.grid(alpha=0.3)
    panels[-1].set_xlabel("iteration")
    handles = dict(
        reversed(pair)
        for panel in panels
        for pair in zip(*panel.get_legend_handles_labels(), strict=True)
    )
    figure.legend(handles.values(), handles.keys(), loc="outside right center", frameon=False)
    figure.savefig(path, dpi=130)


def _label(run: Replay) -> str:
    return f"{run.policy} / {run.interval}" if run.plans else run.policy


def _draw(panel: Any, run: Replay, colour: str) -> None:
    par_I = run.par_IL.mean(axis=1)
    edges = np.linspace(0, len(par_I), min(_POINTS, len(par_I)) + 1).astype(int)
    par_P = np.add.reduceat(par_I, edges[:-1]) / np.diff(edges)
    panel.plot((edges[:-1] + edges[1:]) / 2, par_P, color=colour, linewidth=1, label=_label(run))
