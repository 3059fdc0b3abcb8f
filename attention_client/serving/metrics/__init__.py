"""The endpoint's Prometheus metrics."""
