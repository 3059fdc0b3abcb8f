"""A process's membership: session with the monitor, cluster view, failure reports."""
