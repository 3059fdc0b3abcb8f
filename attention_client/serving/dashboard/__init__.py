"""The page at `/` of the endpoint: the state of the cluster, and a chat."""
