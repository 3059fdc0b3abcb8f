"""Failure detection: leases, suspicion, clients' failure reports."""
