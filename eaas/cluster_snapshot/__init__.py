"""Snapshots of a running cluster for the dashboard and `eaas top`: read, fold, compare."""

from eaas.cluster_snapshot.model import ClusterSnapshot
from eaas.cluster_snapshot.reader import SnapshotReader

__all__ = ["ClusterSnapshot", "SnapshotReader"]
