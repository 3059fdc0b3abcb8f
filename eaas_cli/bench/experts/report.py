"""The report of `eaas bench experts` and its plot, from its document at the end."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from pathlib import Path
from typing import Any

from eaas.errors import ConfigError
from eaas_cli.bench.experts.plan import AUTO, DTYPES
from eaas_cli.console import print_table
from eaas_cli.option_values import refuse_unwritable

__all__ = ["check_plot", "draw_plot", "print_report"]

_STYLES = dict(zip(DTYPES, itertools.product(("-", "--", "-.", ":"), ("o", "s")), strict=False))
_COLUMNS = ("dtype", "T", "kernel", "ms", "limit", "bound")
_BUSY_CORES = 0.1


def print_report(document: dict[str, Any]) -> None:
    """Print the machine's limits, the rows, and the skipped combinations."""
    machine = document["machine"]
    read = machine["read_gb_per_s"]
    where = machine.get("device") or (
        f"{machine['processor']}, {machine['threads']} threads of {machine['cores']} cores"
    )
    print(
        f"{where}: reads {read['median']:.3g} GB/s ({read['least']:.3g} to {read['most']:.3g}; {read['way']})"
    )
    for dtype, gemm in machine["gemm_tflops"].items():
        print(
            f"multiplies {gemm['median']:.3g} TFLOP/s in {dtype} "
            f"({gemm['least']:.3g} to {gemm['most']:.3g}; {gemm['way']})"
        )
    if machine["busy_cores_elsewhere"] > _BUSY_CORES:
        print(
            f"Other processes kept {machine['busy_cores_elsewhere']} cores busy: "
            "measure again on an idle machine"
        )
    for shape in dict.fromkeys(row["shape"] for row in document["rows"]):
        _print_layer([row for row in document["rows"] if row["shape"] == shape])
    print(
        "limit: fraction of the machine's limit at that moment; * picked by auto; "
        "eager, grouped_mm, batched_mm: speed-up over transformers'"
    )
    for entry in document.get("tuned", ()):
        tile = ", ".join(f"{name} {size}" for name, size in entry["tile"].items())
        print(
            f"{entry['dtype']}, {entry['bucket']} rows per expert: {tile}; {entry['share']:.3g} of the "
            "time of the tile in the code"
        )
    for entry in document["skipped"]:
        tokens = f" T={entry['tokens']}" if "tokens" in entry else ""
        print(
            f"skipped: {entry['shape']} {entry['dtype']}{tokens} {entry['what']}: {entry['reason']}"
        )


def _print_layer(rows: list[dict[str, Any]]) -> None:
    """Print the rows of one layer. The row of the kernel that `auto` chose is marked, if there is one."""
    name = f"{rows[0]['name']}: " if "name" in rows[0] else ""
    title = f"{name}H,I,E,K = {rows[0]['shape']}"
    picks = {(row["dtype"], row["tokens"], row["picked"]) for row in rows if "picked" in row}
    named = {(row["dtype"], row["tokens"], row["kernel"]) for row in rows}
    lines = []
    for row in rows:
        kernel = row.get("picked", row["kernel"])
        place = (row["dtype"], row["tokens"], kernel)
        if "picked" not in row or place not in named:
            lines.append(_words(row, f"{kernel} *" if place in picks else kernel))
    columns = (*_COLUMNS, *rows[0]["speedup"], "error")
    print_table(columns, lines, left=("kernel", "bound"), title=title)


def _words(row: dict[str, Any], kernel: str) -> list[str]:
    return [
        row["dtype"],
        str(row["tokens"]),
        kernel,
        f"{row['ms']:.4g}",
        f"{row['roofline_fraction']:.2f}",
        row["bound"],
        *("-" if ratio is None else f"{ratio:.2f}" for ratio in row["speedup"].values()),
        f"{row['rel_error']:.0e}",
    ]


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


def draw_plot(document: dict[str, Any], path: Path) -> None:
    """Draw the document of `bench_experts` into a PNG: a line per kernel (colour) and dtype (dashes)."""
    figures = importlib.import_module("matplotlib.figure")
    rows = document["rows"]
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    # Rows of `auto` repeat those of its choice, unless nothing else was measured.
    shown = [row for row in rows if row["kernel"] != AUTO] or rows
    kernels = list(dict.fromkeys(row["kernel"] for row in shown))
    figure = figures.Figure(figsize=(6.4 * len(shapes) + 1.8, 5.2), layout="constrained")
    panels = figure.subplots(1, len(shapes), sharey=True, squeeze=False)[0]
    for panel, shape in zip(panels, shapes, strict=True):
        here = [row for row in shown if row["shape"] == shape]
        _draw(panel, here, kernels)
        panel.set_title(_title(here[0]))
    panels[0].set_ylabel("fraction of the roofline")
    # Set this after drawing, because it also fixes the top of all panels.
    panels[0].set_ylim(bottom=0)
    handles = {
        label: handle
        for panel in panels
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside right center", frameon=False)
    machine = document["machine"]
    where = machine.get("device") or f"{machine['processor']}, {machine['threads']} threads"
    figure.suptitle(
        f"{where}: reads "
        f"{machine['read_gb_per_s']['median']:.3g} GB/s, multiplies "
        + ", ".join(
            f"{gemm['median']:.3g} TFLOP/s ({dtype})"
            for dtype, gemm in machine["gemm_tflops"].items()
        ),
        fontsize="medium",
    )
    figure.savefig(path, dpi=130)


def _draw(panel: Any, rows: list[dict[str, Any]], kernels: list[str]) -> None:
    tokens = sorted({row["tokens"] for row in rows})
    panel.axhline(1.0, color="black", linewidth=1)
    for kernel in kernels:
        for dtype, (dashes, marker) in _STYLES.items():
            line = [row for row in rows if (row["kernel"], row["dtype"]) == (kernel, dtype)]
            if line:
                panel.plot(
                    [row["tokens"] for row in line],
                    [row["roofline_fraction"] for row in line],
                    color=f"C{kernels.index(kernel)}",
                    linestyle=dashes,
                    marker=marker,
                    markersize=5,
                    label=f"{kernel} {dtype}",
                )
    panel.set_xscale("log", base=2)
    panel.set_xticks(tokens, [str(value) for value in tokens])
    panel.set_xlabel("tokens")
    panel.grid(alpha=0.3)


def _title(row: dict[str, Any]) -> str:
    hidden, intermediate, experts, top_k = row["shape"].split(",")
    name = f"{row['name']}: " if "name" in row else ""
    return f"{name}hidden {hidden}, intermediate {intermediate}, {experts} experts, top-{top_k}"
