"""What this machine's network has carried, as the kernel counts it (proc_net_dev(5))."""

from __future__ import annotations

from pathlib import Path

__all__ = ["carried", "read_carried"]

_TABLE = Path("/proc/net/dev")
_LOOPBACK = "lo"
# Of the columns after an interface's name.
_RECEIVED, _SENT = 0, 8


def read_carried() -> tuple[int, int]:
    """Bytes received and sent by all interfaces of this network namespace, without the loopback."""
    return carried(_TABLE.read_text())


def carried(table: str) -> tuple[int, int]:
    """The same, of the text of /proc/net/dev."""
    received = sent = 0
    # Two lines of headings come first.
    for line in table.splitlines()[2:]:
        name, _, rest = line.partition(":")
        if name.strip() != _LOOPBACK:
            columns = rest.split()
            received += int(columns[_RECEIVED])
            sent += int(columns[_SENT])
    return received, sent
