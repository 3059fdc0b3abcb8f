"""Bytes carried by this machine's network interfaces (proc_net_dev(5))."""

from __future__ import annotations

from pathlib import Path

__all__ = ["carried", "read_carried"]

_TABLE = Path("/proc/net/dev")
_LOOPBACK = "lo"
# Columns after an interface's name.
_RECEIVED, _SENT = 0, 8


def read_carried() -> tuple[int, int]:
    """Bytes received and sent by all interfaces of this network namespace except the loopback."""
    return carried(_TABLE.read_text())


def carried(table: str) -> tuple[int, int]:
    """Parse the text of /proc/net/dev, as `read_carried`."""
    received = sent = 0
    # Skip two heading lines.
    for line in table.splitlines()[2:]:
        name, _, rest = line.partition(":")
        if name.strip() != _LOOPBACK:
            columns = rest.split()
            received += int(columns[_RECEIVED])
            sent += int(columns[_SENT])
    return received, sent
