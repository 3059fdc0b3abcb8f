"""The monitor process: membership, leases and the watch service."""

from monitor.main import run

__all__ = ["run"]
