"""The page at `/` of the endpoint: the cluster, seen, and a chat."""

from attention_client.dashboard.mount import Dashboard

__all__ = ["Dashboard"]
