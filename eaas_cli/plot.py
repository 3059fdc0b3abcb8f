"""Line plots of a command's figures, for `--plot FILE.png`; they need matplotlib, an extra."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from eaas.errors import ConfigError
from eaas_cli.option_values import refuse_unwritable

__all__ = ["Line", "check_plot", "draw_plot"]

_DASHES = ("-", "--", "-.", ":")
_COLOURS = 10


class Line(NamedTuple):
    """A line of a plot. `error`: half of the bar at each point."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    error: Sequence[float] | None = None


def check_plot(path: Path) -> None:
    """Check that a plot can be written; call it before the run. Raises ConfigError."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed: "
            "pip install 'expert-as-a-service[bench]'"
        )
    if path.suffix != ".png":
        raise ConfigError(f"--plot {path}: give the name of a .png file")
    refuse_unwritable("--plot", path)


def draw_plot(
    path: Path,
    panels: Mapping[str, Sequence[Line]],
    x: str,
    y: str,
    *,
    limit: float | None = None,
    ticks: Sequence[float] | None = None,
) -> None:
    """Draw a PNG with a panel of lines for each title; a label has the same line in all panels.

    Args:
        path: File to write.
        panels: Lines by title.
        x, y: Names of the axes.
        limit: A value to mark.
        ticks: Values of a logarithmic axis x; None: the axis is linear.
    """
    figures = importlib.import_module("matplotlib.figure")
    labels = list(dict.fromkeys(line.label for lines in panels.values() for line in lines))
    figure = figures.Figure(figsize=(9, 3.2 * len(panels) + 0.6), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axis, (title, lines) in zip(axes, panels.items(), strict=True):
        for line in lines:
            dash, colour = divmod(labels.index(line.label), _COLOURS)
            axis.errorbar(
                *(line.x, line.y, line.error),
                label=line.label,
                color=f"C{colour}",
                linestyle=_DASHES[dash % len(_DASHES)],
                linewidth=1,
                capsize=2,
            )
        if limit is not None:
            axis.axhline(limit, color="black", linewidth=1)
        if ticks is not None:
            axis.set_xscale("log", base=2)
            axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set(title=title, xlabel=x, ylabel=y)
        axis.grid(alpha=0.3)
    handles = {
        label: handle
        for axis in axes
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside right center", frameon=False)
    figure.savefig(path, dpi=130)
