"""The report of `python -m benchmarks.monitor`."""

from __future__ import annotations

from typing import Any

from eaas_cli.console import print_table

__all__ = ["print_report"]

_COLUMNS = (
    *("members", "watchers", "cores", "us/heartbeat", "MB", "heartbeats/s", "answer p50", "p99"),
    *("hold", "hold cpu", "lapsed", "goodbye: first", "last", "death: first", "last"),
)


def print_report(document: dict[str, Any]) -> None:
    """Print a row per number of watchers of each step."""
    machine = document["machine"]
    print(f"{machine['processor']}, {machine['cores']} cores; milliseconds")
    rows = []
    for row in document["rows"]:
        cells = [row["heartbeats"] | {"watchers": 0}] if "heartbeats" in row else []
        if "snapshots" in row:
            cells.append(row["snapshots"] | {"watchers": f"{row['snapshots']['watchers']} anew"})
        for cell in (*cells, *row["watching"]):
            answer = cell["answer_ms"] or {"p50": "-", "p99": "-"}
            ends = [cell.get(kind, {}) for kind in ("goodbye_ms", "death_ms")]
            found = (
                *(row["members"], cell["watchers"], cell["cpu_cores"]),
                *(cell["cpu_us_per_heartbeat"], cell["rss_mb"], cell["heartbeats_per_s"]),
                *(answer["p50"], answer["p99"]),
                *(cell["hold_ms"], cell["hold_cpu_ms"], cell["ended"]),
                *(end.get(which, "") for end in ends for which in ("first", "last")),
            )
            rows.append([str(value) for value in found])
    print_table(_COLUMNS, rows)
    for row in document["rows"]:
        if "error" in row:
            print(f"{row['members']} members: not all could join: {row['error']}")
        if "snapshot" in row:
            print(
                f"{row['members']} members joined in {row['join_s']} s; a snapshot has "
                f"{row['snapshot']['bytes']} bytes and takes {row['snapshot']['ms']} ms"
            )
        if "snapshots" in row:
            storm = row["snapshots"]
            print(
                f"{row['members']} members, {storm['watchers']} watchers that reconnect: "
                f"{storm['snapshots']} snapshots, {storm['megabytes']} MB; the longest step of the "
                f"monitor's loop took {storm['hold_ms']} ms ({storm['hold_cpu_ms']} ms of a processor), "
                f"{storm['ended']} leases lapsed"
            )
