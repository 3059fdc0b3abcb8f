"""Snapshots of a running cluster, for the dashboard and the terminal."""

from eaas.cluster_snapshot.model import ClusterSnapshot
from eaas.cluster_snapshot.reader import SnapshotReader

__all__ = ["ClusterSnapshot", "SnapshotReader"]
