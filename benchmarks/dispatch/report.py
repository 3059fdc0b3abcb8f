"""The report of `python -m benchmarks.dispatch`."""

from __future__ import annotations

from typing import Any

from eaas_cli.console import print_table

__all__ = ["print_report"]

_COLUMNS = ("T", "floor", "p99", "exchange", "p99", "over", "times", "layer", "p99", "client")
_DEVICE = ("device", "p99")
_BUSY_CORES = 0.1


def print_report(document: dict[str, Any]) -> None:
    """Print the rows, the cost of a server, and the skipped cells."""
    machine = document["machine"]
    device = f", {machine['device']}" if "device" in machine else ""
    print(f"{machine['processor']}, {machine['cores']} cores{device}; microseconds, p50 and p99")
    if machine["busy_cores_elsewhere"] > _BUSY_CORES:
        print(
            f"Other processes kept {machine['busy_cores_elsewhere']} cores busy: "
            "measure again on an idle machine"
        )
    rows = document["rows"]
    for transport, hidden in dict.fromkeys((row["transport"], row["hidden"]) for row in rows):
        here = [row for row in rows if (row["transport"], row["hidden"]) == (transport, hidden)]
        columns = (*_COLUMNS, *(_DEVICE if "device_call_us" in here[0] else ()))
        print_table(columns, list(map(_cells, here)), title=f"{transport}, hidden {hidden}")
    print(
        "over, times: exchange to floor; layer: with dispatch and combine; "
        "client: dispatch and combine alone"
    )
    if device:
        print("device: a layer call for tensors on the GPU, until the result is there")
    if "server" in document:
        _print_server(document)
    for layer in document.get("layer", ()):
        print(
            f"layer {layer['shape']} T={layer['tokens']}, {layer['kernel']}, {layer['threads']} threads: "
            f"{layer['in_process_ms']:.4g} ms in process, {layer['through_server_ms']:.4g} ms through a "
            f"server, ratio {layer['ratio']:.4g}"
        )
    if "servers" in document:
        joint = document["servers"]
        print(
            f"a layer call of {joint['tokens']} tokens to {joint['servers']} servers that sleep "
            f"{joint['sleep_us']} us: {joint['all_us']:.4g} us, to one {joint['one_us']:.4g} us, "
            f"ratio {joint['ratio']:.3g}"
        )
    for entry in document["skipped"]:
        print(f"skipped: {entry['what']}: {entry['reason']}")


def _print_server(document: dict[str, Any]) -> None:
    server = document["server"]
    paused = server["paused_exchange_us"]
    print(
        f"server ({server['transport']}, hidden {server['hidden']}, T={server['tokens']}): "
        f"{100 * server['idle_cpu_fraction']:.2g} % of a core idle, "
        f"{100 * server['busy_cpu_fraction']:.3g} % at {server['exchanges_per_s']:.4g} exchanges/s; "
        f"after a pause an exchange takes {paused['p50']:.4g} us, p99 {paused['p99']:.4g}"
    )


def _short(us: float) -> str:
    """Format microseconds with three digits and no exponent, so that ten columns fit a narrow terminal."""
    return f"{us:.0f}" if us >= 99.95 else f"{us:.3g}"


def _cells(row: dict[str, Any]) -> list[str]:
    figures = (
        *row["floor_us"].values(),
        *row["exchange_us"].values(),
        *(row["over_floor_us"], row["times_floor"]),
        *row["layer_call_us"].values(),
        row["client_us"],
        *row.get("device_call_us", {}).values(),
    )
    return [str(row["tokens"]), *map(_short, figures)]
