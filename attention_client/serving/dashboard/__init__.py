"""The page at `/` of the endpoint: the state of the cluster, and a chat."""

from attention_client.serving.dashboard.mount import Dashboard

__all__ = ["Dashboard"]
