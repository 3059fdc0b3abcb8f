"""The dashboard, the page at `/` of the attention client's endpoint: the state of the cluster, and a chat."""
