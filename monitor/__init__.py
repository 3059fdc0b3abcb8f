"""Who is in the cluster: membership, leases and the watch service."""

from monitor.main import run

__all__ = ["run"]
