"""The report of `eaas bench experts`, printed from its document at the end."""

from __future__ import annotations

from typing import Any

from eaas_cli.console import print_table

__all__ = ["print_report"]

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
