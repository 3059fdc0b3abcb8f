"""The dashboard, the endpoint's page at `/`: the state of the cluster, and a chat."""
