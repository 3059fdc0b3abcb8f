"""A process's membership of the cluster: session with the monitor, cluster view, failure reports."""
