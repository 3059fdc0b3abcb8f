"""Failure detection in the monitor: leases, suspicion, progress, clients' failure reports."""
