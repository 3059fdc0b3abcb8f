"""The report of `eaas bench experts` and its plot, from its document at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eaas_cli.console import print_table
from eaas_cli.plot import Line, draw_plot

__all__ = ["draw", "print_report"]

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
    """Print the rows of one layer; those of the kernel that `auto` chose are marked."""
    name = f"{rows[0]['name']}: " if "name" in rows[0] else ""
    title = f"{name}H,I,E,K = {rows[0]['shape']}"
    columns = (*_COLUMNS, *rows[0]["speedup"], "error")
    print_table(columns, map(_words, rows), left=("kernel", "bound"), title=title)


def _words(row: dict[str, Any]) -> list[str]:
    return [
        row["dtype"],
        str(row["tokens"]),
        row["kernel"] + (" *" if row["auto"] else ""),
        f"{row['ms']:.4g}",
        f"{row['roofline_fraction']:.2f}",
        row["bound"],
        *("-" if ratio is None else f"{ratio:.2f}" for ratio in row["speedup"].values()),
        f"{row['rel_error']:.0e}",
    ]


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
