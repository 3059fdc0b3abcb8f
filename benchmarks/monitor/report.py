"""The report."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["print_report"]

_COLUMNS = (
    *("members", "watchers", "cores", "us/heartbeat", "MB", "heartbeats/s", "answer p50", "p99"),
    *("goodbye: first", "last", "death: first", "last"),
)


def print_report(document: dict[str, Any]) -> None:
    """Print a row per number of watchers of each step, and the first failure."""
    machine = document["machine"]
    print(f"{machine['processor']}, {machine['cores']} cores; milliseconds")
    table = Table(box=None, pad_edge=False)
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for row in document["rows"]:
        cells = [row["heartbeats"] | {"watchers": 0}] if "heartbeats" in row else []
        for cell in (*cells, *row["watching"]):
            answer = cell["answer_ms"] or {"p50": "-", "p99": "-"}
            ends = [cell.get(kind, {}) for kind in ("goodbye_ms", "death_ms")]
            table.add_row(
                *(str(row["members"]), str(cell["watchers"]), str(cell["cpu_cores"])),
                *(str(cell["cpu_us_per_heartbeat"]), str(cell["rss_mb"])),
                *(str(cell["heartbeats_per_s"]), str(answer["p50"]), str(answer["p99"])),
                *(str(end.get(which, "")) for end in ends for which in ("first", "last")),
            )
    Console(width=140).print(table)
    for row in document["rows"]:
        if "snapshot" in row:
            print(
                f"{row['members']} members joined in {row['join_s']} s; a snapshot has "
                f"{row['snapshot']['bytes']} bytes and takes {row['snapshot']['ms']} ms"
            )
    for row in document["registry"]:
        print(
            f"the registry alone, {row['members']} members: {row['heartbeat_us']} us per heartbeat, "
            f"{row['tick_us']} us per tick"
        )
    broke = document["breaks"]
    if broke is None:
        print("nothing broke")
    else:
        where = f"{broke['members']} members"
        if broke.get("watchers"):
            where += f" and {broke['watchers']} watchers"
        print(f"first failure, with {where}: {broke['what']}")
