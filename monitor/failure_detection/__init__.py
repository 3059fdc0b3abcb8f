"""Failure detection: leases, suspicion, progress, clients' failure reports."""
